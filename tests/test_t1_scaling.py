"""Inference scaling: what the summariser sees, what the x-axis counts, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.t1 import probe, scaling
from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import Sampling
from algorithms.t1.scaling import scaling_curve, truncate
from algorithms.t1.tasks import PADDING, Countdown, make_policy
from algorithms.t1.workload import WORKLOAD
from envs import countdown
from heliostat import checkpoint
from heliostat.errors import UsageError
from heliostat.folder import RunFolder

E = countdown.END
TASK = Countdown(3)
RECIPE = replace(WORKLOAD.recipe("smoke"), hidden=32, layers=1, feed_forward=32, max_new_tokens=20)
POLICY = make_policy(RECIPE, TASK).eval()
OTHER = make_policy(replace(RECIPE, seed=1), TASK).eval()
ROWS = TASK.rows("test")[:6]
THINKING = Sampling(2, 20, E)


def test_thoughts_are_cut_and_short_ones_count_their_own_length():
    tokens = np.array([[1, 2, 3, 4], [5, E, E, E], [6, 7, 8, E]])
    cut, used = truncate(tokens, np.array([4, 2, 4]), 3, E)
    assert cut.tolist() == [[1, 2, 3], [PADDING, PADDING, 5], [6, 7, 8]]
    assert used.tolist() == [3, 2, 3]
    cut, used = truncate(tokens, np.array([4, 2, 4]), 9, E)
    assert cut.tolist() == [[1, 2, 3, 4], [PADDING, PADDING, PADDING, 5], [PADDING, 6, 7, 8]]
    assert used.tolist() == [4, 2, 4]
    cut, used = truncate(tokens, np.array([4, 2, 4]), 0, E)
    assert cut.shape == (3, 0)
    assert used.tolist() == [0, 0, 0]


def test_the_summariser_never_sees_past_the_budget(monkeypatch: pytest.MonkeyPatch):
    seen: list[np.ndarray] = []
    sample = scaling._sample

    def spying(model, prompts, sampling, generator):
        if model is OTHER:
            seen.append(prompts)
        answers = sample(model, prompts, sampling, generator)
        if model is POLICY and sampling.temperature > 0:
            answers.tokens[:, 5:] = marker  # what is behind the budget must not matter
        return answers

    monkeypatch.setattr(scaling, "_sample", spying)
    curves: list[scaling.Curve] = []
    for marker in (3, 4):  # noqa: B007 - read by the spy
        curves.append(scaling_curve(TASK, ROWS, (POLICY, OTHER), THINKING, (0, 3, 5), 0))
    assert curves[0].points == curves[1].points
    for first, second, budget in zip(seen[:3], seen[3:], (0, 3, 5), strict=True):
        assert np.array_equal(first, second)
        assert first.shape[1] == countdown.THREE.prompt_tokens + budget


def test_without_thought_the_curve_is_the_summariser_alone():
    curve = scaling_curve(TASK, ROWS, (POLICY, OTHER), THINKING, (0, 20), 0)
    swapped = scaling_curve(TASK, ROWS, (OTHER, OTHER), THINKING, (0,), 7)
    assert curve.points[0] == swapped.points[0]
    assert [point.budget for point in curve.points] == [0, 20]
    assert curve.points[0].tokens == 0
    assert curve.points[1].tokens == curve.whole.tokens <= 20


def test_a_finished_and_right_thought_stays_right():
    trace, chosen = TASK.traces(ROWS, seed=0)
    lengths = chosen.sum(axis=1)
    start = countdown.THREE.prompt_tokens
    tokens = np.where(chosen, trace, E)[:, start:]
    cut, used = truncate(tokens, lengths, 99, E)
    assert (used == lengths).all()
    room = (cut == PADDING).sum(axis=1)
    for row, thought in enumerate(cut):
        whole = [*thought[room[row] :], E]
        answers, ends = TASK.commit(np.array([whole]), np.array([len(whole)]))
        assert TASK.grade([ROWS[row]], answers[None], ends[None]).solved.all()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.write_text(RECIPE.to_yaml())
    for step, model in ((2, OTHER), (4, POLICY)):
        state = {"policy": {"model": TokenScorer(model).state_dict()}}
        checkpoint.save(run.checkpoints, step, state)
    return run


def test_a_checkpoint_is_found_and_loaded(folder: RunFolder):
    assert probe.Policy.of(folder).step == 4
    loaded = probe.Policy.of(folder, 2).scorer.policy
    for name, weight in OTHER.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    with pytest.raises(UsageError, match=r"step 3 .* steps \[2, 4\]"):
        probe.Policy.of(folder, 3)


def test_the_commands_print_numbers(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    assert probe.main(["temperature", str(folder.path), "--prompts", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["entropies"]) == 14
    best = found["temperature"]
    assert best["majority"] == pytest.approx(found["entp"])
    assert best["best_of_n"] == pytest.approx(found["entp"] + 0.1)
    arguments = ["thinking", str(folder.path), "--summariser", "2", "--prompts", "4"]
    assert probe.main(arguments) == 0
    curves = json.loads(capsys.readouterr().out)
    assert list(curves) == ["2", "4"]
    assert curves["2"]["points"][0] == curves["4"]["points"][0]
