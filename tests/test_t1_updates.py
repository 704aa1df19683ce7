"""One update: the same gradient however it is cut, and the sampler's own log-probabilities."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.roles import Answerer
from algorithms.t1.sampler import Sampling
from algorithms.t1.tasks import PADDING, Countdown, make_policy
from algorithms.t1.updates import (
    Batch,
    micro_batches,
    policy_update,
    supervised_step,
    warm_cosine,
)
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


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path, norm: str) -> None:
    batch = Batch.of([episodes(ragged_prompts())])
    after: list[dict[str, torch.Tensor]] = []
    metrics: list[dict[str, float]] = []
    for tokens_per_pass in (100_000, 60, 1):
        recipe = replace(
            TINY, tokens_per_pass=tokens_per_pass, loss_norm=norm, warm_updates=1, beta=0.1
        )
        run = a_run(tmp_path, recipe)
        policy = learner(run, rate=0.5)
        anchor = TokenScorer(
            scratch_model(ModelShape(hidden=32, layers=1, heads=1, feed_forward=32), 111, 109, 9)
        )
        metrics.append(policy_update(run, policy, anchor, batch, update=0))
        after.append(policy.model.state_dict())
    assert metrics[0]["train/gradient_norm"] > 0
    for other, numbers in zip(after[1:], metrics[1:], strict=True):
        for name, value in after[0].items():
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-4)
        assert numbers == pytest.approx(metrics[0], rel=1e-3, abs=1e-5)


def test_passes_hold_every_row_once_and_keep_to_their_size(tmp_path: Path) -> None:
    run = a_run(tmp_path, replace(TINY, tokens_per_pass=50))
    lengths = torch.tensor([9, 3, 30, 12, 7, 22, 5, 60])
    passes = micro_batches(run, lengths)
    rows = torch.cat([rows for rows, _ in passes])
    assert sorted(rows.tolist()) == list(range(8))
    assert all(width == lengths[rows].max() for rows, width in passes)
    assert [width for _, width in passes] == sorted(width for _, width in passes)


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

    passes = micro_batches(Rank(), torch.tensor(lengths))
    wanted = max(-(-sum(lengths) // 300), others_passes)
    assert len(passes) == min(wanted, len(lengths), others_rows)
    assert sorted(torch.cat([rows for rows, _ in passes]).tolist()) == list(range(len(lengths)))


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
