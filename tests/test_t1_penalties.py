"""Penalties: what they find, and the guard against what they teach."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithms.t1 import penalties
from algorithms.t1.penalties import FalseClaims
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat.folder import RunFolder
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker


def test_a_penalty_replaces_the_reward_right_or_wrong() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    shown = torch.tensor([False, True, True, False])
    assert penalties.penalised_rewards(rewards, shown).tolist() == [1.0, -1.0, -1.0, 0.0]
    assert penalties.penalised_rewards(rewards, shown, -0.5).tolist() == [1.0, -0.5, -0.5, 0.0]


def test_repeated_ngrams_of_hand_written_answers() -> None:
    tokens = torch.tensor(
        [
            [1, 2, 1, 2, 9, 9, 9, 9],  # (1, 2) twice; the nines are padding
            [1, 2, 1, 2, 1, 2, 0, 0],  # (1, 2) three times
            [5, 5, 5, 5, 0, 0, 0, 0],  # (5, 5) three times, overlapping
            [1, 2, 3, 4, 5, 6, 7, 8],
        ]
    )
    lengths = torch.tensor([4, 6, 4, 8])
    assert penalties.repeats_ngram(tokens, lengths, 2, 1).tolist() == [True, True, True, False]
    assert penalties.repeats_ngram(tokens, lengths, 2, 2).tolist() == [False, True, True, False]
    assert penalties.repeats_ngram(tokens, lengths, 2, 3).tolist() == [False] * 4
    assert penalties.repeats_ngram(tokens, lengths, 9, 1).tolist() == [False] * 4
    with pytest.raises(ValueError, match="n=0"):
        penalties.repeats_ngram(tokens, lengths, 0, 1)


def test_garbage_is_what_the_anchor_finds_unlikely_token_by_token() -> None:
    uniform = torch.tensor([-4.0, -8.0, -1.0]) * torch.log(torch.tensor(5.0))
    found = penalties.perplexities(uniform, torch.tensor([4, 8, 2]))
    torch.testing.assert_close(found, torch.tensor([5.0, 5.0, 5.0**0.5]))


def a_run(folder: Path, *switched_on: str) -> Run[T1Recipe]:
    recipe = replace(WORKLOAD.recipe("smoke"), penalise=switched_on)
    return Run(Assignment(WORKLOAD, recipe, RunFolder(folder), 1, {}), JsonlTracker(folder))


def warnings_of(run: Run[T1Recipe]) -> list[str]:
    return [row["text"] for row in run.folder.events.read() if row["event"] == "warning"]


def feed(guard: FalseClaims, run: Run[T1Recipe], rates: list[float]) -> float:
    rise = 0.0
    for rate in rates:
        rise = guard.watch(run, {"train/false_claims": rate})["train/false_claims_rise"]
    return rise


def test_a_penalty_that_teaches_false_claims_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, guard = a_run(tmp_path, "overlong"), FalseClaims()
    with caplog.at_level(logging.WARNING):
        assert feed(guard, run, [0.17] * 5 + [0.2] * 5) == pytest.approx(0.03)
        assert not caplog.records
        resumed = FalseClaims()
        resumed.load(guard.state())
        assert feed(resumed, run, [0.51] * 10) == pytest.approx(0.34)
    (text,) = warnings_of(run)
    assert "rose from 17% to" in text
    assert "penalise=['overlong']" in text
    assert [record.getMessage() for record in caplog.records] == [text]


def test_without_a_penalty_and_for_small_rises_the_guard_is_silent(tmp_path: Path) -> None:
    assert feed(FalseClaims(), a_run(tmp_path), [0.1] * 5 + [0.9] * 5) == pytest.approx(0.8)
    feed(FalseClaims(), a_run(tmp_path, "overlong"), [0.4] * 5 + [0.55] * 5)
    assert not warnings_of(a_run(tmp_path))
