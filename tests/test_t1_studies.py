"""The studies: arms differ in what they name, tables come from numbers, the README from tables."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from algorithms.t1.scaling import Point
from benchmarks.t1_studies import ARMS, BUDGETS, FRACTIONS, STUDIES, Size, main, recipe_of
from benchmarks.t1_tables import FIGURES, NAMES, format_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "t1"
METRICS = ("accuracy", "accuracy_t05", "overlong", "false_claims")


def table_of(study: str, gain: float = 0.1) -> dict[str, object]:
    """Numbers as a study writes them: every arm gains the same on each of three seeds."""
    start = {f"sft_{name}": [0.2, 0.25, 0.3] for name in METRICS}
    end = {name: [0.2 + gain, 0.25 + gain, 0.3 + gain] for name in METRICS}
    arm = {**start, **end, "cpu_s": [1.0, 2.0, 3.0]}
    table: dict[str, object] = {
        "seeds": [0, 1, 2], "updates": 40, "prompts": 512, "commit": "abc", "wall_s": 7,
        "arms": dict.fromkeys(STUDIES[study], arm),
    }  # fmt: skip
    points = [{"budget": one, "tokens": float(one), "accuracy": one / 50} for one in BUDGETS]
    whole = [{"budget": None, "tokens": 30.0, "accuracy": 0.5}] * 2
    assert set(points[0]) == {item.name for item in fields(Point)}
    table["curves"] = [{str(one): [*points, *whole] for one in FRACTIONS}] * 3
    return table


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_differs_from_the_base_in_what_it_names(arm: str) -> None:
    base, recipe = recipe_of("base", 0, Size()), recipe_of(arm, 0, Size())
    differing = {
        item.name
        for item in fields(recipe)
        if getattr(recipe, item.name) != getattr(base, item.name)
    }
    assert differing == ARMS[arm].keys()
    recipe.check()


def test_arms_of_equal_samples_take_equally_many() -> None:
    totals = {
        recipe.answers_per_prompt * recipe.prompts_per_step * recipe.steps
        for recipe in (recipe_of(arm, 0, Size()) for arm in ("k4-equal", "base", "k64-equal"))
    }
    assert totals == {10_240}


def test_every_fraction_of_thinking_has_a_checkpoint() -> None:
    recipe = recipe_of("long", 0, Size())
    for fraction in FRACTIONS:
        step = recipe.sft_steps + round(fraction * recipe.steps)
        assert step == recipe.sft_steps or step % recipe.checkpoint_every == 0


@pytest.mark.parametrize("study", STUDIES)
def test_a_table_tells_means_and_intervals(study: str) -> None:
    text = format_table(study, table_of(study))
    assert "3 seeds, 40 updates, 512 test prompts; commit abc, 7 s" in text
    lines = text.splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    if study == "thinking":
        assert len(lines) == 2 + len(BUDGETS) + 2 + 2
        assert "| 36 | 72.0 | 72.0 | 72.0 | 72.0 | +0.0 ± 0.0 |" in lines
    else:
        assert all("| 25.0 | 35.0 | +10.0 ± 0.0 |" in line for line in lines[2:-2])
    assert FIGURES[study](table_of(study)).axes


def test_every_arm_and_study_has_a_name() -> None:
    assert set(NAMES) == set(ARMS)
    assert set(STUDIES) == set(FIGURES)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_readme_shows_what_a_study_wrote(path: Path) -> None:
    readme = (ROOT / "algorithms" / "t1" / "README.md").read_text()
    assert format_table(path.stem, json.loads(path.read_text())) in readme
    assert path.with_suffix(".png").stat().st_size > 5_000
    assert f"docs/t1/{path.stem}.png" in readme


@pytest.mark.long
def test_all_studies_run_at_the_smallest_size_and_go_on_where_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--seeds", "2", "--runs", str(tmp_path / "runs")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    for study in STUDIES:
        assert (tmp_path / "runs" / f"{study}.png").stat().st_size > 5_000
    assert main(arguments) == 0
    stripped = [
        [line for line in text.splitlines() if line.startswith("|")]
        for text in (first, capsys.readouterr().out)
    ]
    assert stripped[0] == stripped[1]
