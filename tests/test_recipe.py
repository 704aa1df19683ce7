"""Recipes: what goes in is checked, what comes out goes in again unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Gt, Le
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.workload import T1Recipe
from heliostat.errors import UsageError
from heliostat.layout import Demand, Hosts, Layout, demands
from heliostat.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    overlong: bool = False
    ngram: Annotated[int, Gt(0)] = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers(Recipe):
    lr: Annotated[float, Gt(0), Le(1)] = 0.1
    norm: Literal["token", "sequence"] = "token"
    budgets: tuple[int, ...] = (1, 2)
    data_file: str = ""
    penalties: Penalties = Penalties()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.norm == "sequence" and self.lr > 0.5:
            raise UsageError(f"lr: expected at most 0.5 with norm=sequence, found {self.lr}")


recipes = st.builds(
    Numbers,
    steps=st.integers(0, 10**9),
    seed=st.integers(0, 2**63),
    lr=st.floats(1e-9, 0.5),
    norm=st.sampled_from(["token", "sequence"]),
    budgets=st.lists(st.integers()).map(tuple),
    data_file=st.text(),
    layout=st.sampled_from([Layout.in_process(), Layout.laptop(), Layout.cluster()]),
)


@given(recipes)
def test_a_recipe_survives_dict_and_yaml(recipe: Numbers) -> None:
    assert Numbers.from_dict(recipe.to_dict()) == recipe
    assert Numbers.from_dict(yaml.safe_load(recipe.to_yaml())) == recipe


@given(recipes, recipes)
def test_fingerprints_agree_exactly_when_recipes_do(one: Numbers, other: Numbers) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)
    assert one.fingerprint() == Numbers.from_dict(one.to_dict()).fingerprint()


@given(recipes)
def test_overriding_every_scalar_with_its_own_text_changes_nothing(recipe: Numbers) -> None:
    texts = [f"steps={recipe.steps}", f"lr={recipe.lr!r}", f"norm={recipe.norm}"]
    texts += [f"layout.learners={recipe.layout.learners}", f"data_file={recipe.data_file}"]
    texts += [f"budgets={list(recipe.budgets)}", f"penalties.ngram={recipe.penalties.ngram}"]
    if not recipe.data_file.startswith(("[", "{")) and recipe.data_file != "null":
        assert recipe.override(*texts) == recipe


def test_an_override_is_read_by_its_fields_type() -> None:
    changed = Numbers(steps=1).override(
        "steps=20", "layout.environment.hosts=4", "penalties.overlong=true", "data_file=7"
    )
    assert changed.steps == 20
    assert changed.layout.environment == Hosts(hosts=4)
    assert changed.penalties == Penalties(overlong=True)
    assert changed.data_file == "7"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.2", 0.2),
        ("1e-4", 1e-4),
        ("7", 7),
        ("true", True),
        ("null", None),
        ("relu", "relu"),
        ("[64, 0.5]", [64, 0.5]),
        ("{a: 1}", {"a": 1}),
        ("2026-01-01", "2026-01-01"),
        ("", None),
        ("[", "["),
    ],
)
def test_an_entry_of_a_mapping_is_read_as_yaml(text: str, value: object) -> None:
    changed = Numbers(steps=1).override(f"extra.clip={text}")
    assert changed.extra == {"clip": value}
    assert Numbers.from_dict(yaml.safe_load(changed.to_yaml())) == changed


def test_entries_of_a_mapping_add_to_those_that_are_there() -> None:
    recipe = Numbers(steps=1, extra={"a": 1, "buffer": {"size": 5}})
    changed = recipe.override("extra.a=2", "extra.buffer.alpha=0.5", "extra.new.deep.b=3")
    assert changed.extra == {
        "a": 2,
        "buffer": {"size": 5, "alpha": 0.5},
        "new": {"deep": {"b": 3}},
    }
    assert recipe.extra == {"a": 1, "buffer": {"size": 5}}
    assert recipe.override("extra={c: 1}").extra == {"c": 1}
    assert changed.fingerprint() != recipe.fingerprint()


def test_what_a_recipe_knows() -> None:
    assert all(map(Numbers.knows, [*Numbers.keys(), "extra.any", "extra.any.deeper"]))
    assert not any(map(Numbers.knows, ["extras", "lr.any", "penalties.any", "layout"]))


def test_a_layout_preset_can_be_chosen_and_changed_in_one_command() -> None:
    changed = Numbers(steps=1).override("layout=laptop", "layout.learners=2")
    assert changed.layout == replace(Layout.laptop(), learners=2)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("stepz=3", "unknown key 'stepz'; did you mean 'steps'"),
        ("layout.learner=2", "did you mean 'layout.learners'"),
        ("hosts=2", "did you mean 'layout."),
        ("ngrm=2", "did you mean 'penalties.ngram'"),
        ("layout=lap", "unknown layout preset 'lap'; did you mean 'laptop'"),
        ("layout.data=3", "unknown key 'layout.data'"),
        ("steps", "expected key=value, found 'steps'"),
        ("steps=x", "steps: .*valid integer.*found 'x'"),
        ("steps=-1", "steps: .*greater than or equal to 0, found '-1'"),
        ("lr=0", "lr: .*greater than 0"),
        ("lr=2", "lr: .*less than or equal to 1"),
        ("lr=nan", "lr: "),
        ("norm=word", "norm: .*'token' or 'sequence', found 'word'"),
        ("penalties.overlong=perhaps", "penalties.overlong: .*boolean"),
        ("extra=3", "extra: .*dictionary.*found '3'"),
        ("extra.a=.nan", r"extra\.a: expected a finite number, found nan"),
        ("layout.environment.hosts=-2", "layout.environment.hosts: .*found '-2'"),
    ],
)
def test_a_bad_override_is_refused_with_the_remedy(assignment: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Numbers(steps=1).override(assignment)


def test_an_entry_below_a_scalar_is_refused() -> None:
    with pytest.raises(UsageError, match=r"extra\.a\.b: 'a' is 1, which has no entries"):
        Numbers(steps=1, extra={"a": 1}).override("extra.a.b=2")


def test_a_combination_that_a_method_forbids_is_refused_in_its_own_words() -> None:
    with pytest.raises(
        UsageError, match=r"^lr: expected at most 0\.5 with norm=sequence, found 0\.9$"
    ):
        Numbers(steps=1).override("norm=sequence", "lr=0.9")


def test_an_elastic_minimum_above_the_wish_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected at most layout\.learners=2, found 3"):
        Numbers(steps=1).override("layout.learners=2", "layout.min_learners=3")


def test_a_file_with_a_missing_key_is_refused() -> None:
    with pytest.raises(UsageError, match="steps: field required"):
        Numbers.from_dict({"seed": 1})


def test_a_member_count_covers_every_host() -> None:
    assert Hosts(hosts=4, members=2).num_members == 4
    assert Hosts(hosts=2, members=20).num_members == 20


def test_an_elastic_layout_asks_for_its_least_and_pools_for_their_hosts() -> None:
    layout = Layout(learners=8, min_learners=3, learner_cpus=4, learner_gpus=1)
    pools = {"samplers": Hosts(hosts=2, members=9, cpus=0.5), "judges": Hosts(members=4)}
    assert demands(layout, pools) == [
        Demand("learners", 3, 4, 1),
        Demand("samplers hosts", 2, 0.5, 0),
    ]
    assert demands(Layout.in_process(), {}) == []


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    assert Layout(data=Hosts(hosts=3)).hosts_of("data").hosts == 3
    with pytest.raises(UsageError, match=r"unknown role family 'enviroment'.*'environment'"):
        Layout().hosts_of("enviroment")


def test_files_are_named_absolutely_so_that_a_run_resumes_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").touch()
    recipe = T1Recipe(steps=1, questions="mine.jsonl", model="none")
    assert recipe.located().questions == str(tmp_path / "mine.jsonl")
    assert recipe.located().model == "none"  # refused later, as the user wrote it
