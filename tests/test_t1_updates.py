"""One update: the same gradient however it is cut, and the sampler's own log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.batches import Batch, deal, dealt, micro_batches, passes
from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.roles import Answerer
from algorithms.t1.sampler import Sampling
from algorithms.t1.tasks import PADDING, Countdown, make_policy
from algorithms.t1.updates import policy_update, supervised_step, warm_cosine
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat.actors.environment import Episodes
from heliostat.folder import RunFolder
from heliostat.learner import Learner
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker

TINY = replace(
    WORKLOAD.recipe("smoke"),
    hidden=32,
    layers=1,
    feed_forward=32,
    prompts_per_step=4,
    answers_per_prompt=3,
    max_new_tokens=20,
)


def a_run(folder: Path, recipe: T1Recipe) -> Run[T1Recipe]:
    assignment = Assignment(WORKLOAD, recipe, RunFolder(folder), 1, {})
    return Run(assignment, JsonlTracker(folder))


def learner(run: Run[T1Recipe], rate: float = 1.0) -> Learner[TokenScorer]:
    policy = TokenScorer(make_policy(run.recipe, Countdown(max_failures=5)))
    return run.learner(policy, lambda model: torch.optim.SGD(model.parameters(), lr=rate))


def episodes(prompts: np.ndarray, seed: int = 0, **changes: Any) -> Episodes:
    recipe = replace(TINY, **changes)
    sampling = Sampling(
        answers_per_prompt=recipe.answers_per_prompt,
        max_new_tokens=recipe.max_new_tokens,
        end_token=Countdown.end_token,
        temperature=recipe.temperature,
    )
    answerer = Answerer(recipe, Countdown(max_failures=5), sampling)
    fields = answerer.act(prompts, torch.Generator().manual_seed(seed))
    shape = fields["lengths"].shape
    reward = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(np.float32)
    fields |= {"observation": prompts, "reward": reward}
    fields |= {name: np.zeros(shape, bool) for name in ("false_claims", "repetitive")}
    return Episodes(3, seed, {name: value[None] for name, value in fields.items()})


def ragged_prompts(rows: int = 4) -> np.ndarray:
    prompts = np.random.default_rng(1).integers(1, 99, size=(rows, 6))
    for row in range(rows):
        prompts[row, :row] = PADDING
    return prompts


def test_a_learner_scores_what_the_sampler_recorded_also_behind_padding(tmp_path: Path) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    run = a_run(tmp_path, TINY)
    scorer = learner(run).model
    found = scorer(batch.tokens, batch.answer, TINY.temperature).log_probs
    assert batch.answer.sum() == batch.lengths.sum()
    torch.testing.assert_close(found, batch.sampled[batch.answer], atol=1e-4, rtol=0)


def test_jobs_of_different_widths_join_row_by_row() -> None:
    wide = episodes(ragged_prompts(2), seed=1)
    narrow = episodes(ragged_prompts(2)[:, 2:], seed=2)
    both = Batch.of([wide, narrow])
    alone = Batch.of([narrow])
    tail = slice(2 * TINY.answers_per_prompt, None)
    width = alone.tokens.shape[1]
    assert torch.equal(
        both.tokens[tail, :width] * both.answer[tail, :width], alone.tokens * alone.answer
    )
    assert torch.equal(both.lengths[tail], alone.lengths)


class Ranks:
    """Ranks as threads of this process: they meet to exchange values and to average gradients."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=60)
        self._values: list[Any] = [None] * world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(work, range(self.world)))


class RankRun(Run[T1Recipe]):
    """One rank's run among ``Ranks``."""

    def __init__(self, folder: Path, recipe: T1Recipe, ranks: Ranks, rank: int) -> None:
        assignment = Assignment(WORKLOAD, recipe, RunFolder(folder), 1, {})
        super().__init__(assignment, JsonlTracker(folder), rank, ranks.world)
        self._ranks = ranks

    def gather(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank, value)

    def sum(self, value: float) -> float:
        return sum(self.gather(value))

    def largest(self, value: float) -> float:
        return max(self.gather(value))


class RankLearner(Learner[TokenScorer]):
    """Averages gradients over ``Ranks`` before it steps."""

    def __init__(self, run: RankRun, model: TokenScorer, rate: float) -> None:
        self._run = run
        super().__init__(
            model,
            lambda model: torch.optim.SGD(model.parameters(), lr=rate),
            run.recipe.layout,
            run.device,
            world=1,
        )

    def step(self, rate: float = 1.0, max_norm: float = float("inf")) -> float:
        for weight in self.model.parameters():
            assert weight.grad is not None
            weight.grad = torch.stack(self._run.gather(weight.grad)).mean(dim=0)
        return super().step(rate, max_norm)


Result = tuple[dict[str, float], dict[str, torch.Tensor]]


def an_update(
    folder: Path, recipe: T1Recipe, batch: Batch, world: int = 1, layout: Any = "auto"
) -> Result:
    """Takes one step of plain gradient descent in float64; prompts are dealt out over ranks."""
    ranks = Ranks(world)
    prompts = torch.arange(len(batch.lengths) // batch.copies)
    shape = ModelShape(hidden=32, layers=1, heads=1, feed_forward=32)
    start = TokenScorer(make_policy(recipe, Countdown(max_failures=5)), layout).double()
    other = TokenScorer(scratch_model(shape, 111, 109, 9), layout).double()

    def work(rank: int) -> Result:
        run = RankRun(folder, recipe, ranks, rank)
        model, anchor = deepcopy(start), deepcopy(other)
        policy = RankLearner(run, model, rate=0.5)
        mine = batch.prompts(prompts[rank::world])
        return policy_update(run, policy, anchor, mine, update=0), model.state_dict()

    results = ranks.each(work)
    for metrics, weights in results[1:]:
        assert metrics == results[0][0]
        assert all(torch.equal(value, results[0][1][name]) for name, value in weights.items())
    return results[0]


def assert_same(one: Result, other: Result, tolerance: float = 1e-9) -> None:
    assert one[0]["train/gradient_norm"] > 0
    assert other[0] == pytest.approx(one[0], rel=1e-6, abs=max(tolerance, 1e-8))
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut_laid_out_or_dealt(
    tmp_path: Path, norm: str
) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    graded = torch.rand(len(batch.lengths), generator=torch.Generator().manual_seed(3)) > 0.1
    batch = replace(batch, graded=graded)
    recipe = replace(TINY, loss_norm=norm, warm_updates=1, beta=0.1, tokens_per_pass=100_000)
    whole = an_update(tmp_path, recipe, batch)
    small = replace(recipe, tokens_per_pass=60)
    assert_same(whole, an_update(tmp_path, small, batch))
    assert_same(whole, an_update(tmp_path, replace(recipe, tokens_per_pass=1), batch))
    assert_same(whole, an_update(tmp_path, small, batch, layout="rows"), 1e-6)
    assert_same(whole, an_update(tmp_path, small, batch, layout="packed"), 1e-6)
    assert_same(whole, an_update(tmp_path, small, batch, world=2))
    assert_same(whole, an_update(tmp_path, small, batch, world=4))


@pytest.mark.parametrize("importance", ["truncated", "clipped", "none"])
@pytest.mark.parametrize("kl", ["reward", "loss", "none"])
def test_the_other_losses_do_not_depend_on_it_either(
    tmp_path: Path, importance: str, kl: str
) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    noise = torch.randn(batch.sampled.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, sampled=(batch.sampled + 0.3 * noise) * batch.answer)
    changes = {"importance": importance, "kl": kl, "advantage": "grpo", "beta": 0.1}
    recipe = replace(TINY, **changes, warm_updates=1, penalise=("garbage",), garbage_perplexity=1.5)
    one = an_update(tmp_path, replace(recipe, tokens_per_pass=100_000), batch)
    assert_same(one, an_update(tmp_path, replace(recipe, tokens_per_pass=60), batch, world=2))
    assert one[0]["train/penalised"] == 1
    assert (one[0]["train/cut_tokens"] > 0) == (importance != "none")
    assert one[0]["train/kl"] != 0


def test_a_64_answer_group_has_the_same_gradient_in_one_pass_and_in_sixteenths(
    tmp_path: Path,
) -> None:
    batch = Batch.of([episodes(ragged_prompts(1), answers_per_prompt=64)])
    recipe = replace(TINY, answers_per_prompt=64, warm_updates=1, tokens_per_pass=100_000)
    whole = an_update(tmp_path, recipe, batch)
    size = int(batch.lengths.sum()) // 4
    assert_same(whole, an_update(tmp_path, replace(recipe, tokens_per_pass=size), batch))
    assert_same(whole, an_update(tmp_path, recipe, batch, layout="rows"), 1e-6)


def test_long_answers_weigh_no_more_than_their_tokens(tmp_path: Path) -> None:
    """Token shares are of the whole batch: a pass of few tokens is not scaled up to a mean."""
    run = a_run(tmp_path, replace(TINY, tokens_per_pass=60, warm_updates=1))
    batch = dealt(run, Batch.of([episodes(ragged_prompts())]))
    parts = passes(run, batch)
    assert len(parts) > 2
    tokens = torch.cat([part.owners for part in parts])
    assert len(tokens) == batch.lengths.sum()
    assert torch.equal(tokens.bincount(), batch.lengths)


def echoes(rows: int, copies: int, seed: int) -> Episodes:
    """Episodes whose answers repeat their prompt, then say which copy they are."""
    prompts = np.random.default_rng(seed).integers(1, 99, size=(rows, 4))
    answers = np.repeat(prompts[:, None], copies, axis=1)
    numbers = np.broadcast_to(np.arange(copies)[:, None], (rows, copies, 1))
    shape = (rows, copies)
    fields = {
        "observation": prompts,
        "action": np.concatenate([answers, numbers], axis=2),
        "log_probs": np.zeros((*shape, 5), np.float32),
        "versions": np.zeros((*shape, 5), np.int32),
        "lengths": np.full(shape, 5),
        "reward": np.broadcast_to(np.arange(copies) % 2, shape).astype(np.float32),
    }
    fields |= {n: np.zeros(shape, bool) for n in ("finished", "false_claims", "repetitive")}
    return Episodes(0, seed, {name: value[None] for name, value in fields.items()})


def test_every_answer_stays_with_its_own_prompt_over_jobs_ranks_and_passes(tmp_path: Path) -> None:
    ranks, recipe = Ranks(2), replace(TINY, tokens_per_pass=30)

    def work(rank: int) -> torch.Tensor:
        run = RankRun(tmp_path, recipe, ranks, rank)
        jobs = [echoes(3 + rank, 3, seed=10 * rank + job) for job in range(2)]
        batch = dealt(run, Batch.of(jobs))
        parts = passes(run, batch)
        assert len(parts) > 1
        for part in parts:
            given, said = part.tokens[:, :4], part.tokens[part.chosen].view(-1, 5)
            assert torch.equal(given, said[:, :4])
            assert torch.equal(batch.rewards[part.owners.view(-1, 5)[:, 0]], said[:, 4] % 2)
        return torch.cat([part.tokens for part in parts])

    seen = torch.cat(ranks.each(work))
    assert len(seen) == len(seen.unique(dim=0)) == 3 * 2 * (3 + 4)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_dealing_shares_everything_out_and_no_hand_is_much_fuller(
    costs: list[int], hands: int
) -> None:
    given = deal(costs, hands)
    assert sorted(place for hand in given for place in hand) == list(range(len(costs)))
    fullest = max(sum(costs[place] for place in hand) for hand in given)
    assert fullest <= sum(costs) / hands + max(costs, default=0)
    if all(costs) and len(costs) >= hands:
        assert all(given)


def test_a_rank_with_nothing_to_learn_keeps_in_step(tmp_path: Path) -> None:
    batch = Batch.of([episodes(ragged_prompts(2))])
    rewards = batch.rewards.view(2, -1).clone()
    rewards[1] = 1.0
    recipe = replace(TINY, warm_updates=1, drop_flat_groups=True, beta=0.1)
    batch = replace(batch, rewards=rewards.flatten())
    one = an_update(tmp_path, recipe, batch)
    assert_same(one, an_update(tmp_path, recipe, batch, world=2))
    assert one[0]["train/mixed_groups"] == 0.5


def test_a_hard_anchor_moves_every_so_often_and_then_is_the_policy(tmp_path: Path) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    run = a_run(tmp_path, replace(TINY, warm_updates=1, anchor_decay=0.0, anchor_every=2))
    policy = learner(run, rate=0.1)
    anchor = deepcopy(policy.model).requires_grad_(requires_grad=False)
    start = deepcopy(anchor.state_dict())
    policy_update(run, policy, anchor, batch, update=0)
    assert all(torch.equal(start[name], value) for name, value in anchor.state_dict().items())
    policy_update(run, policy, anchor, batch, update=1)
    moved = policy.model.state_dict()
    assert all(torch.equal(moved[name], value) for name, value in anchor.state_dict().items())
    assert any(not torch.equal(start[name], value) for name, value in moved.items())


def test_passes_hold_every_row_once_and_keep_to_their_size(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(TINY, tokens_per_pass=50))
    lengths = torch.tensor([9, 3, 30, 12, 7, 22, 5, 60])
    found = micro_batches(run, lengths)
    assert sorted(torch.cat(found).tolist()) == list(range(8))
    longest = [int(lengths[rows].max()) for rows in found]
    assert longest == sorted(longest)


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=60),
    st.integers(1, 80),
    st.integers(1, 70),
)
def test_every_rank_gets_equally_many_passes_and_none_is_empty(
    lengths: list[int], others_passes: int, others_rows: int
) -> None:
    class Rank(Run[T1Recipe]):
        """One of two ranks; the other needs so many passes for so many rows."""

        def __init__(self) -> None:
            self.recipe = replace(TINY, tokens_per_pass=300)
            self._others = iter([others_passes, -others_rows])

        def largest(self, value: float) -> float:
            return max(value, next(self._others))

    found = micro_batches(Rank(), torch.tensor(lengths))
    wanted = max(-(-sum(lengths) // 300), others_passes)
    assert len(found) == min(wanted, len(lengths), others_rows)
    assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))


def test_equal_rewards_and_no_entropy_bonus_leave_the_policy_alone(tmp_path: Path) -> None:
    given = episodes(ragged_prompts())
    flat = Episodes(3, 0, {**given.fields, "reward": np.ones_like(given["reward"])})
    recipe = replace(TINY, beta=0.0, entropy_coef=0.0, warm_updates=1)
    run = a_run(tmp_path, recipe)
    policy = learner(run)
    before = deepcopy(policy.model.state_dict())
    metrics = policy_update(run, policy, deepcopy(policy.model), Batch.of([flat]), update=0)
    assert all(
        torch.equal(before[name], value) for name, value in policy.model.state_dict().items()
    )
    assert metrics["train/mixed_groups"] == 0
    assert metrics["train/reward"] == 1


def test_rewarded_answers_become_more_likely_and_the_anchor_follows(tmp_path: Path) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    recipe = replace(TINY, beta=0.0, entropy_coef=0.0, warm_updates=1, anchor_decay=0.5)
    run = a_run(tmp_path, recipe)
    policy = learner(run, rate=0.1)
    anchor = deepcopy(policy.model).requires_grad_(requires_grad=False)
    start = deepcopy(policy.model.state_dict())

    def likelihood() -> torch.Tensor:
        scores = policy.model(batch.tokens, batch.answer, TINY.temperature).log_probs
        owners = batch.answer.nonzero()[:, 0]
        return scores.new_zeros(len(batch.lengths)).index_add(0, owners, scores)

    before = likelihood()
    policy_update(run, policy, anchor, batch, update=0)
    moved = (likelihood() - before).detach()
    mixed = batch.rewards.view(-1, batch.copies)
    gain = (moved.view_as(mixed) * (mixed - mixed.mean(1, keepdim=True))).sum()
    assert gain > 0
    for name, value in anchor.state_dict().items():
        middle = (start[name] + policy.model.state_dict()[name]) / 2
        torch.testing.assert_close(value, middle)


def test_a_supervised_step_lowers_the_loss_of_its_own_traces(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(TINY, sft_steps=100))
    policy = learner(run, rate=0.5)
    task = Countdown(max_failures=5)
    traces = task.traces(task.rows("train")[:16], seed=0)
    losses = [supervised_step(run, policy, traces, step)["sft/loss"] for step in range(30, 36)]
    assert losses[0] == pytest.approx(np.log(111), rel=0.1)
    assert losses == sorted(losses, reverse=True)


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    rates = [warm_cosine(step, 100, warm=5.0) for step in range(100)]
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[:6] == sorted(rates[:6])
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)
