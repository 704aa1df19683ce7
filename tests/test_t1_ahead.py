"""Sampling ahead: pauses, top-ups and stops lose no answer, count none twice, and stay in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.ahead import Ahead
from algorithms.t1.batches import Batch
from algorithms.t1.model import TokenScorer
from algorithms.t1.roles import Answerer, Ask, Problems, Samplers
from algorithms.t1.sampler import Sampling
from algorithms.t1.tasks import PADDING, Countdown, make_policy
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat import checkpoint, launch
from heliostat.actors.data import Reader, Stream
from heliostat.actors.environment import Episodes
from heliostat.folder import RunFolder
from heliostat.launch import Order, Outcome
from heliostat.layout import Hosts, Layout
from heliostat.pool import LocalPool, Member, idempotent
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker, read_metrics
from heliostat.weights import Weights

TINY = replace(
    WORKLOAD.recipe("smoke"),
    layout=Layout.in_process(),
    hidden=32,
    layers=1,
    feed_forward=32,
    sft_steps=6,
    sft_warm_steps=1,
    sft_batch=8,
    steps=6,
    prompts_per_step=4,
    prompts_per_job=2,
    answers_per_prompt=3,
    max_new_tokens=12,
    max_staleness=2,
    partial_tokens=3,
    checkpoint_every=100,
    eval_every=3,
    eval_prompts=8,
    test_prompts=8,
    test_answers=2,
)


def order(folder: Path, recipe: T1Recipe) -> Order:
    return Order(workload=WORKLOAD, spec="t1", recipe=recipe, folder=RunFolder(folder))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What the learner is given, update by update."""
    seen: list[Batch] = []
    given_out = Ahead.next

    def watched(self: Ahead, weights: Weights, update: int) -> list[Episodes]:
        parts = given_out(self, weights, update)
        seen.append(Batch.of(parts))
        return parts

    monkeypatch.setattr(Ahead, "next", watched)
    return seen


def numbers(outcome: Outcome) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "eval/", "lag/"))}
        for row in read_metrics(outcome.folder)
    ]


# ---------------------------------------------------------------------------- partial rollouts


def test_answers_pause_and_go_on_under_newer_weights(tmp_path: Path, batches: list[Batch]) -> None:
    outcome = launch.create(order(tmp_path / "a", TINY))
    assert len(batches) == TINY.steps
    mixed = 0
    for update, batch in enumerate(batches):
        step = TINY.sft_steps + update
        assert len(batch.lengths) == TINY.prompts_per_step * TINY.answers_per_prompt
        assert (batch.lengths[~batch.finished] == TINY.max_new_tokens).all()
        for row in range(len(batch.lengths)):
            versions = batch.versions[row][batch.answer[row]].tolist()
            assert versions == sorted(versions), "later tokens come from later weights"
            assert step - TINY.max_staleness <= versions[0]
            assert versions[-1] <= step
            mixed += versions[0] != versions[-1]
            if update >= TINY.max_staleness:
                expected = [step - 2] * 3 + [step - 1] * 3 + [step] * 6
                assert versions == expected[: len(versions)]
    assert mixed > 0
    lags = [row["lag/versions"] for row in read_metrics(outcome.folder) if "lag/versions" in row]
    assert lags == [0, 1, 2, 2, 2, 2]


def test_pauses_change_no_number_where_the_weights_do_not_change(tmp_path: Path) -> None:
    """Twenty updates at a rate of nothing: sampler and learner agree, paused or not."""
    still = replace(
        TINY, steps=20, sft_steps=1, lr=1e-30, muon_lr=1e-30, eval_every=20, prompts_per_step=2
    )
    outcomes = [
        launch.create(order(tmp_path / str(tokens), replace(still, partial_tokens=tokens)))
        for tokens in (0, 5)
    ]
    plain, paused = ([row for row in numbers(one) if "train/drift" in row] for one in outcomes)
    assert len(plain) == 20
    for one, other in zip(plain, paused, strict=True):
        assert max(one["train/drift"], other["train/drift"]) < 1e-4
        assert one == pytest.approx(other, abs=1e-4)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch.create(order(tmp_path_factory.mktemp("straight") / "a", TINY))


@pytest.mark.parametrize("stop_at", [6, 8])
def test_a_stop_between_pauses_resumes_to_the_same_numbers(
    tmp_path: Path, straight: Outcome, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = order(tmp_path / "stopped", TINY)
    report = Run.report

    def stopping(self: Run[Any], step: int, metrics: Any, state: Any) -> None:
        if step == stop_at:
            wanted.folder.stop.touch()
        report(self, step, metrics, state)

    monkeypatch.setattr(Run, "report", stopping)
    assert launch.create(wanted).stopped
    monkeypatch.undo()
    found = checkpoint.latest(wanted.folder.checkpoints)
    assert found is not None
    waiting = found[1]["ahead"]["batches"]
    assert len(waiting) == (0 if stop_at == 6 else 2)
    resumed = launch.resume(wanted)
    assert resumed.metrics == straight.metrics
    assert numbers(resumed) == numbers(straight)


def test_saved_partial_answers_go_on_over_more_ranks(tmp_path: Path) -> None:
    problems: Any = LocalPool("problems", Problems, TINY, 1)
    samplers: Any = LocalPool("samplers", Samplers, TINY, 1)
    weights = Weights.of_tensors(TokenScorer(make_policy(TINY, Countdown(3))).state_dict(), 6)

    def ahead(rank: int, world: int) -> Ahead:
        pools = {"problems": problems, "samplers": samplers}
        assignment = Assignment(WORKLOAD, TINY, RunFolder(tmp_path), 1, pools)
        run = Run[T1Recipe](assignment, JsonlTracker(tmp_path), rank, world)
        return Ahead(run, Stream(problems, Problems, 0))

    alone = ahead(0, 1)
    alone.next(weights, 0)
    saved = alone.state()
    assert any((part["fields"]["finish"] == 2).any() for part in saved["batches"][0])
    checkpoint.save(tmp_path / "c", 1, saved)
    loaded = checkpoint.load(tmp_path / "c" / "step-0000000001")[1]
    whole = Batch.of(alone.next(weights, 1))
    shares = []
    for rank in range(2):
        one = ahead(rank, 2)
        one.load(loaded)
        shares.append(Batch.of(one.next(weights, 1)))
    asked = {tuple(row[:7].tolist()) for row in whole.tokens}
    dealt = [tuple(row[:7].tolist()) for share in shares for row in share.tokens]
    assert len(dealt) == len(whole.tokens)
    assert set(dealt) == asked


def test_a_deadline_makes_calls_return_and_all_answers_arrive(
    tmp_path: Path, batches: list[Batch]
) -> None:
    recipe = replace(TINY, partial_tokens=0, sample_deadline_s=1e-6)
    launch.create(order(tmp_path / "a", recipe))
    assert [len(batch.lengths) for batch in batches] == [12] * 6
    assert all((b.lengths[~b.finished] == TINY.max_new_tokens).all() for b in batches)


# ---------------------------------------------------------------------------- dynamic sampling


class Few(Reader[Any]):
    """As many problems as ``eval_prompts`` says."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        super().__init__(Countdown(3).rows("train")[: recipe.eval_prompts])


class Judged:
    """Answers at once; a prompt's answers differ in reward where its row's number says so."""

    family = "environment"

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        self._recipe = recipe
        self.flat_every = recipe.test_prompts

    @idempotent
    def answer(self, ask: Ask, weights: Weights) -> Episodes:
        rows, copies = np.asarray(ask.job.task), self._recipe.answers_per_prompt
        reward = np.zeros((1, len(rows), copies), np.float32)
        reward[..., 0] = rows.sum(axis=1) % self.flat_every != 0
        ones = np.ones(reward.shape, np.int64)
        fields = {
            "observation": rows[None],
            "action": ones[..., None],
            "log_probs": np.zeros((*reward.shape, 1), np.float32),
            "versions": np.full((*reward.shape, 1), weights.version, np.int32),
            "lengths": ones,
            "finish": ones * 0,
            "finished": ones == 1,
            "reward": reward,
            "repetitive": ones == 0,
            "false_claims": ones == 0,
        }
        return Episodes(weights.version, ask.job.seed, fields)


def judged(folder: Path, recipe: T1Recipe) -> tuple[Ahead, Stream[Any]]:
    pools: dict[str, Any] = {
        "problems": LocalPool("problems", Few, recipe, 1),
        "samplers": LocalPool("samplers", Judged, recipe, 1),
    }
    assignment = Assignment(WORKLOAD, recipe, RunFolder(folder), 1, pools)
    run = Run[T1Recipe](assignment, JsonlTracker(folder))
    stream = Stream(run.pool(Problems), Problems, 0)
    return Ahead(run, stream), stream


@given(
    problems=st.integers(1, 40),
    prompts=st.integers(1, 8),
    rounds=st.integers(0, 4),
    flat_every=st.integers(1, 4),
    staleness=st.integers(0, 2),
)
def test_flat_prompts_are_replaced_and_each_prompt_comes_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    problems: int,
    prompts: int,
    rounds: int,
    flat_every: int,
    staleness: int,
) -> None:
    recipe = replace(
        TINY,
        partial_tokens=0,
        steps=5,
        max_staleness=staleness,
        prompts_per_step=prompts,
        dynamic_sampling=rounds,
        eval_prompts=problems,
        test_prompts=flat_every,
    )
    ahead, stream = judged(tmp_path_factory.getbasetemp(), recipe)
    rows = Countdown(3).rows("train")[:problems]
    drawn: list[tuple[int, ...]] = []
    for update in range(recipe.steps):
        parts = ahead.next(Weights.of({}, update), update)
        seen = np.concatenate([part["observation"][0] for part in parts])
        reward = np.concatenate([part["reward"][0] for part in parts])
        mixed = int((reward.max(axis=1) > reward.min(axis=1)).sum())
        drawn += [tuple(row) for row in seen.tolist()]
        assert mixed <= prompts
        extra = len(seen) - prompts
        assert extra <= max(0, problems - prompts), "no prompt twice in one update"
        if mixed < prompts:  # the rounds or the prompts ran out: what is there is trained on
            possible = sum(sum(row) % flat_every != 0 for row in rows)
            assert rounds == 0 or possible == 0 or extra > 0 or problems <= prompts
    assert len(drawn) == stream.position, "what was drawn was handed over, all of it"
    whole = stream.position // problems
    counts = [drawn.count(tuple(int(x) for x in row)) for row in rows]
    assert min(counts) >= whole
    assert max(counts) <= whole + 1


def test_enough_rounds_fill_the_batch(tmp_path: Path) -> None:
    recipe = replace(
        TINY,
        partial_tokens=0,
        max_staleness=0,
        prompts_per_step=8,
        dynamic_sampling=9,
        eval_prompts=500,
        test_prompts=2,
    )
    ahead, _ = judged(tmp_path, recipe)
    parts = ahead.next(Weights.of({}, 0), 0)
    reward = np.concatenate([part["reward"][0] for part in parts])
    assert int((reward.max(axis=1) > reward.min(axis=1)).sum()) == 8
    assert len(reward) > 8


def test_a_run_with_dynamic_sampling_ends_and_resumes(tmp_path: Path) -> None:
    recipe = replace(TINY, dynamic_sampling=2, checkpoint_every=8)
    straight = launch.create(order(tmp_path / "a", recipe))
    branch = replace(order(tmp_path / "b", recipe), begin_from=(RunFolder(tmp_path / "a"), 8))
    assert launch.create(branch).metrics == straight.metrics


# ---------------------------------------------------------------------------- tokens and prompts


def test_the_learner_is_given_the_very_ids_that_the_sampler_drew() -> None:
    sampling = Sampling(3, 12, Countdown.end_token)
    answerer = Answerer(TINY, Countdown(3), sampling)
    prompts = np.random.default_rng(0).integers(0, 111, (4, 7))
    prompts[1, :3] = PADDING
    fields = answerer.act(prompts, torch.Generator().manual_seed(0))
    shape = fields["lengths"].shape
    fields |= {name: np.zeros(shape, bool) for name in ("repetitive", "false_claims")}
    fields |= {"observation": prompts, "reward": np.zeros(shape, np.float32)}
    batch = Batch.of([Episodes(-1, 0, {name: value[None] for name, value in fields.items()})])
    for row, (prompt, copy) in enumerate(np.ndindex(*shape)):
        drawn = fields["action"][prompt, copy, : fields["lengths"][prompt, copy]]
        asked = prompts[prompt][prompts[prompt] != PADDING]
        wanted = [*asked.tolist(), *drawn.tolist()]
        assert batch.tokens[row, : len(wanted)].tolist() == wanted
        assert batch.tokens[row][batch.answer[row]].tolist() == drawn.tolist()


def test_rewards_belong_to_the_prompts_they_stand_beside(
    tmp_path: Path, batches: list[Batch]
) -> None:
    """Graded again from the learner's rows alone, with two samplers and top-ups: all agree."""
    layout = Layout(environment=Hosts(members=2), data=Hosts(members=3))
    launch.create(order(tmp_path / "a", replace(TINY, layout=layout, dynamic_sampling=1)))
    task = Countdown(3)
    claims = 0
    for batch in batches:
        for row in range(len(batch.lengths)):
            tokens = batch.tokens[row].tolist()  # Q a b c = t :
            problem = np.array([tokens[1], tokens[2], tokens[3], tokens[5]])
            answer = batch.tokens[row][batch.answer[row]].numpy()
            length = np.array([[len(answer)]])
            grades = task.grade([problem], answer[None, None], length)
            assert grades.solved[0, 0] == bool(batch.rewards[row] > 0)
            assert grades.false_claims[0, 0] == bool(batch.false_claims[row])
            claims += int(grades.false_claims[0, 0])
    assert sum(len(batch.lengths) for batch in batches) > 0


def test_every_evaluation_says_which_weights_it_scored(straight: Outcome) -> None:
    rows = [row for row in read_metrics(straight.folder) if "eval/accuracy" in row]
    assert [(row["step"], row["eval/version"]) for row in rows] == [(9, 9), (12, 12)]
