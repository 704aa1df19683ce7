"""TURN: where log entropy bends, on the paper's process, by hand, and beside training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.sampler import Sampling
from algorithms.t1.turn import GRID, choose_temperature, diagnosis, mean_entropy, turning_point
from algorithms.t1.workload import WORKLOAD
from heliostat import launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Layout
from heliostat.tracker import read_metrics


def process(temperature: float, steps: int = 512, copies: int = 64) -> tuple[float, float]:
    """The paper's stochastic process, α = 2: mean token entropy, share of improper tokens."""
    proper = np.exp(np.random.RandomState(0).normal(size=10) / temperature)
    improper = 30_000 * np.exp(-10 / temperature)
    start = improper / (proper.sum() + improper)
    proper /= proper.sum()
    rng = np.random.default_rng(1)
    error, entropy, wrong = np.full(copies, start), 0.0, 0.0
    for _ in range(steps):
        fails = rng.random(copies) < error
        wrong += float(fails.mean())
        error = np.where(fails, 1 - (1 - error) ** 2, np.maximum(error**2, start))
        shares = np.maximum(1 - error, 1e-10)[:, None] * proper
        bad = -error * np.log(error / 30_000)
        entropy += float((bad - (shares * np.log(shares)).sum(axis=1)).mean())
    return entropy / steps, wrong / steps


def test_entp_lies_just_before_errors_breed_errors():
    grid = [round(0.1 + 0.05 * i, 2) for i in range(29)]
    found = [process(temperature) for temperature in grid]
    entp = turning_point(grid, [entropy for entropy, _ in found])
    assert entp == 0.75
    wrong = {temperature: share for temperature, (_, share) in zip(grid, found, strict=True)}
    assert wrong[entp] < 0.01
    assert wrong[1.15] > 0.5


BENT = [-3.0, -2.0, -1.2, -0.6, -0.2, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.1, 2.8, 3.6]
"""log H on the grid; its differences fall to 0.1 at the seventh point and rise from there."""


def test_entp_is_computed_as_by_hand():
    # the second difference two steps wide is 0.8 - 0.5 at the place of 0.7, negative before
    wide = [BENT[i + 2] - 2 * BENT[i] + BENT[i - 2] for i in range(2, 12)]
    first = next(i for i, bend in enumerate(wide, start=2) if bend > 1e-12)
    assert turning_point(GRID, np.exp(BENT).tolist()) == GRID[first] == 0.7
    assert choose_temperature(GRID, np.exp(BENT).tolist(), "majority") == 0.7
    assert choose_temperature(GRID, np.exp(BENT).tolist(), "best_of_n") == pytest.approx(0.8)


@given(st.floats(0.01, 100))
def test_entp_does_not_depend_on_the_unit_of_entropy(unit):
    values = np.exp(BENT) * unit
    if values.min() > 1e-3:
        assert turning_point(GRID, values.tolist()) == 0.7


def test_a_curve_that_never_turns_gives_the_last_interior_temperature():
    concave = [temperature**0.5 for temperature in GRID]
    assert turning_point(GRID, np.exp(concave).tolist()) == GRID[-2]


def test_one_convex_point_alone_is_noise():
    logs = np.array([-((1.5 - temperature) ** 2) for temperature in GRID])
    clean = turning_point(GRID, np.exp(logs).tolist())
    logs[4] -= 0.06  # a dip bends the curve at its own place only
    bend = np.gradient(np.gradient(logs, GRID), GRID)
    assert (bend[1:-1] > 0).any()
    assert turning_point(GRID, np.exp(logs).tolist()) == clean == GRID[-2]


def test_temperatures_without_entropy_are_left_out():
    values = np.exp(BENT)
    frozen = [1e-9, 5e-4, 1e-5, *values.tolist()]
    grid = [*np.linspace(0.01, 0.05, 3), *GRID]
    assert turning_point(grid, frozen) == 0.7
    with pytest.raises(ValueError, match="sample at higher temperatures"):
        turning_point(GRID, [1e-6] * 10 + [0.1, 0.2, 0.3, 0.4])


def test_unsorted_temperatures_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        turning_point([0.1, 0.1, 0.3], [1.0, 2.0, 3.0])


def test_a_diagnosis_tells_on_which_side_training_samples():
    found = diagnosis(GRID, np.exp(BENT).tolist(), 0.95)
    assert found["turn_margin"] == pytest.approx(0.7 - 0.95)
    assert found["turn_log_entropy"] == pytest.approx(0.8)
    assert diagnosis(GRID, [0.0] * len(GRID), 1.0) == {}


def test_mean_entropy_averages_tokens_then_samples_and_ignores_padding():
    model = scratch_model(ModelShape(hidden=32, layers=1, heads=1, feed_forward=32), 7, 6, 0)
    scorer = TokenScorer(model).eval()
    prompts = torch.tensor([[1, 2, 3], [0, 4, 5]])
    real = torch.tensor([[True, True, True], [False, True, True]])
    sampling = Sampling(3, 5, 6, temperature=1.3)
    together = mean_entropy(scorer, prompts, real, sampling, torch.Generator().manual_seed(0))
    flat = mean_entropy(
        scorer, prompts, real, replace(sampling, temperature=1e4), torch.Generator().manual_seed(0)
    )
    assert flat == pytest.approx(np.log(7), abs=1e-3)
    assert 0 < together < flat
    # a single token's entropy is that of the tempered distribution itself
    one = Sampling(1, 1, 6, temperature=1.3)
    logits = model(input_ids=torch.tensor([[4, 5]])).logits[0, -1] / 1.3
    log_p = torch.log_softmax(logits, 0)
    found = mean_entropy(scorer, prompts[1:], real[1:], one, torch.Generator().manual_seed(0))
    assert found == pytest.approx(float(-(log_p.exp() * log_p).sum().detach()), abs=1e-5)


def test_the_rollout_temperature_is_judged_beside_training_and_changes_no_number(tmp_path: Path):
    recipe = replace(
        WORKLOAD.recipe("smoke"),
        layout=Layout.in_process(),
        hidden=32,
        layers=1,
        feed_forward=32,
        sft_steps=2,
        steps=2,
        prompts_per_step=4,
        answers_per_prompt=2,
        max_new_tokens=12,
        eval_every=1,
        eval_prompts=4,
        test_prompts=4,
    )

    def run(name: str, every: int) -> tuple[dict[str, float], list[int]]:
        one = replace(recipe, turn_every=every, turn_prompts=8)
        order = Order(workload=WORKLOAD, spec="t1", recipe=one, folder=RunFolder(tmp_path / name))
        outcome = launch.create(order)
        rows = [row for row in read_metrics(outcome.folder) if "train/turn_entp" in row]
        for row in rows:
            margin = row["train/turn_entp"] - recipe.temperature
            assert row["train/turn_margin"] == pytest.approx(margin)
        return dict(outcome.metrics), [row["step"] for row in rows]

    plain, none = run("plain", 0)
    judged, steps = run("judged", 2)
    assert plain == judged
    assert (none, steps) == ([], [4])
    assert {"majority", "best_of_n", "pass_at_k", "sft_majority"} <= judged.keys()
    with pytest.raises(UsageError, match="multiple of eval_every"):
        replace(recipe, eval_every=2, turn_every=3).check()
