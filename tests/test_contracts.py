"""Every workload of the catalogue keeps the contracts, and each contract catches what breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from annotated_types import Gt
from hypothesis import given
from hypothesis import strategies as st

from algorithms.catalog import CATALOG
from heliostat import Member, Plot, Recipe, Weights, Workload, idempotent
from heliostat.actors.data import Reader, share
from heliostat.actors.environment import GymnasiumEnvironment, Job, ParallelEnvironment, Step
from heliostat.seeding import numpy_generator
from heliostat.testing.contracts import (
    ContractBroken,
    check_environment,
    check_role,
    check_workload,
)
from heliostat.testing.difference import difference
from heliostat.workload import load

Roles = Iterator[tuple[type[Any], list[tuple[Callable[..., Any], tuple[Any, ...]]]]]
Environments = Iterator[tuple[Any, Any, Callable[..., Mapping[str, np.ndarray]]]]


def no_environments(recipe: Any) -> Environments:
    return iter(())


@dataclass(frozen=True)
class Case:
    """How a workload is made small enough to be checked within seconds."""

    spec: str
    overrides: tuple[str, ...]
    roles: Callable[[Any], Roles]
    """Recipe -> each role with calls of the methods that ``train`` uses."""
    environments: Callable[[Any], Environments] = no_environments
    """Recipe -> each environment with a task and a way to act in it."""


def toy_roles(recipe: Any) -> Roles:
    from toy_package.workload import Judge, Rows, Targets

    weights = Weights.of({"weight": np.array([[1.0, 2.0, 3.0]], np.float32)}, version=4)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    yield Rows, [(Rows.size, ()), (Rows.read, (np.array([5, 0, 5]),))]
    yield Targets, [(Targets.answer, (rows, weights))]
    yield Judge, [(Judge.score, (weights,))]


def t1_roles(recipe: Any) -> Roles:
    from algorithms.t1.model import TokenScorer
    from algorithms.t1.roles import Ask, Problems, Samplers, Solvers
    from algorithms.t1.sampler import Pause
    from algorithms.t1.tasks import make_policy, make_task

    task = make_task(recipe)
    scorer = TokenScorer(make_policy(recipe, task))
    weights = Weights.of_tensors(scorer.state_dict(), version=2)
    rows = task.rows("validation")[:3]
    yield (
        Problems,
        [
            (Problems.size, ()),
            (Problems.read, (np.array([3, 1]),)),
            (Problems.held_out, ("test", 4)),
        ],
    )
    jobs = Job(rows, 5), Job(rows[:2], 6)
    asks = [Ask(job, pause=pause) for job in jobs for pause in (Pause(), Pause(tokens=2))]
    yield Samplers, [(Samplers.answer, (ask, weights)) for ask in asks]
    yield Solvers, [(Solvers.solve, (job, weights, 0.5, 2)) for job in jobs]


def t1_environments(recipe: Any) -> Environments:
    from algorithms.t1.roles import Answering
    from algorithms.t1.tasks import make_task

    def answers(prompts: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = generator.integers(task.vocabulary, size=(len(prompts), 3, 9))
        return {"action": tokens, "lengths": np.full((len(prompts), 3), 9)}

    task = make_task(recipe)
    yield Answering(task), task.rows("test")[:4], answers


def lmrl_roles(recipe: Any) -> Roles:
    from algorithms.lmrl.games import make_game
    from algorithms.lmrl.model import agent
    from algorithms.lmrl.roles import Judges, Players, Trajectories

    game = make_game(recipe)
    models = agent(recipe, len(game.words), seed=1)
    weights = Weights.of_tensors(models.state_dict(), version=2)
    jobs = Job(game.cases()[:3], 5), Job(game.cases()[3:5], 6)
    yield Trajectories, [(Trajectories.size, ()), (Trajectories.read, (np.array([3, 1]),))]
    yield Players, [(Players.play, (job, weights)) for job in jobs]
    yield Judges, [(Judges.score, (job, weights)) for job in jobs]


def lmrl_environments(recipe: Any) -> Environments:
    from algorithms.lmrl.games import Playing, make_game

    for name in ("maze_fo", "maze_po", "text_nav_po", "wordle"):
        game = make_game(replace(recipe, game=name))

        def actions(
            seen: np.ndarray, generator: np.random.Generator, game: Any = game
        ) -> dict[str, np.ndarray]:
            said = generator.integers(1, len(game.words), size=(len(seen), game.action_tokens))
            return {"action": said.astype(np.int16)}

        yield Playing(game), game.cases()[:4], actions


CASES = {
    "toy": Case("toy_package.workload:WORKLOAD", ("steps=12", "checkpoint_every=5"), toy_roles),
    "t1": Case(
        "t1",
        (
            "steps=4",
            "checkpoint_every=3",
            "sft_steps=3",
            "sft_batch=4",
            "hidden=32",
            "layers=1",
            "prompts_per_step=4",
            "prompts_per_job=2",
            "answers_per_prompt=3",
            "max_new_tokens=12",
            "eval_every=1",
            "eval_prompts=4",
            "turn_every=1",
            "turn_prompts=2",
            "test_prompts=4",
            "test_answers=2",
        ),
        t1_roles,
        t1_environments,
    ),
    "lmrl": Case(
        "lmrl",
        (
            "game=wordle",
            "steps=3",
            "bc_steps=2",
            "checkpoint_every=2",
            "warm_steps=2",
            "episodes=30",
            "batch=4",
            "hidden=32",
            "layers=1",
            "eval_every=1",
            "eval_cases=2",
            "eval_repeats=1",
            "test_cases=3",
            "test_repeats=1",
        ),
        lmrl_roles,
        lmrl_environments,
    ),
}
"""Name -> case; one for each workload of the catalogue that needs no Ray."""
ELSEWHERE = {"rllib": "tests/test_rllib.py"}
"""Name -> where it is checked on a Ray."""


def recipe_of(case: Case) -> tuple[Workload, Recipe]:
    workload, _ = load(case.spec, CATALOG)
    return workload, workload.recipe().override("layout=in_process", *case.overrides)


def test_every_workload_of_the_catalogue_is_checked():
    assert CATALOG.keys() <= CASES.keys() | ELSEWHERE.keys(), (
        "add a case, with overrides that make it small"
    )


@pytest.mark.parametrize("name", CASES)
def test_a_workload_keeps_its_contract(tmp_path, name):
    check_workload(*recipe_of(CASES[name]), tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_roles_of_a_workload_keep_theirs(name):
    _, recipe = recipe_of(CASES[name])
    for role, calls in CASES[name].roles(recipe):
        check_role(role, recipe, calls)


@pytest.mark.parametrize("name", CASES)
def test_the_environments_of_a_workload_keep_theirs(name):
    _, recipe = recipe_of(CASES[name])
    for environment, task, actions in CASES[name].environments(recipe):
        check_environment(environment, task, actions)


# ---------------------------------------------------------------------------- broken roles

RECIPE = Recipe(steps=1, seed=3)
ITEM = np.arange(3.0)


class Sound:
    """A role that breaks nothing: one method of each kind."""

    family = "environment"

    def __init__(self, recipe: Recipe, member: Member) -> None:
        self.recipe, self.member = recipe, member
        self.generator = np.random.default_rng(member.seed("noise"))
        self.buffer = np.zeros(3)
        self.calls = 0

    @idempotent
    def scale(self, item: np.ndarray) -> np.ndarray:
        return item * 2

    def noise(self, item: np.ndarray) -> np.ndarray:
        return item + self.generator.normal(size=item.shape)

    def count(self) -> int:
        self.calls += 1
        return self.calls


CALLS = [("scale", (ITEM,)), ("scale", (ITEM + 1,)), ("noise", (ITEM,)), ("count", ())]


class Writing(Sound):
    @idempotent
    def scale(self, item):
        item *= 2
        return item.copy()


class Pooling(Sound):
    @idempotent
    def scale(self, item):
        np.multiply(item, 2, out=self.buffer)
        return self.buffer


class Careless(Sound):
    @idempotent
    def scale(self, item):
        return item * 2 + 0 * random.random()


class Untransportable(Sound):
    @idempotent
    def scale(self, item):
        return lambda: item


class Remembering(Sound):
    @idempotent
    def scale(self, item):
        return item * self.count()


class Drawing(Sound):
    @idempotent
    def scale(self, item):
        return item + self.generator.normal()


class Personal(Sound):
    @idempotent
    def scale(self, item):
        return item + self.member.index


class Unseeded(Sound):
    def noise(self, item):
        return item + np.random.default_rng().normal(size=item.shape)


class Chorus(Sound):
    def __init__(self, recipe, member):
        super().__init__(recipe, member)
        self.generator = np.random.default_rng(recipe.seed)


class Stray(Sound):
    family = "environments"


def calls_of(role: type[Any]) -> list[Any]:
    return [(getattr(role, name), arguments) for name, arguments in CALLS]


def test_a_sound_role_passes():
    check_role(Sound, RECIPE, calls_of(Sound))


@pytest.mark.parametrize(
    ("role", "law"),
    [
        (Writing, "a role leaves its arguments as they are"),
        (Pooling, "an answer belongs to its caller"),
        (Careless, "a role draws from generators of its own"),
        (Untransportable, "answers travel between processes by pickle"),
        (Remembering, "an idempotent method answers from its arguments and its constructor alone"),
        (Drawing, "an idempotent method answers from its arguments and its constructor alone"),
        (Personal, "how many members a pool has changes no number"),
        (Unseeded, "what a role draws follows from the run's seed"),
        (Chorus, "members draw different streams"),
        (Stray, "a role's family is one of data, environment, evaluation"),
    ],
)
def test_a_broken_role_is_told_its_law_and_the_likely_cause(role, law):
    with pytest.raises(ContractBroken, match=law) as caught:
        check_role(role, RECIPE, calls_of(role))
    assert role.__name__ in str(caught.value)
    assert "likely cause: " in str(caught.value)


def test_the_method_of_a_parent_is_no_call_on_its_child():
    with pytest.raises(ContractBroken, match=r"Sound\.scale is not Personal's"):
        check_role(Personal, RECIPE, calls_of(Sound))


class Shelf(Reader[int]):
    def __init__(self, recipe: Recipe, member: Member) -> None:
        super().__init__(list(share(5, member)))


class Shuffled(Reader[int]):
    """Every reader shuffles its own share."""

    def __init__(self, recipe: Recipe, member: Member) -> None:
        order = numpy_generator(recipe.seed, "shelf").permutation(len(share(5, member)))
        super().__init__([share(5, member)[place] for place in order])


def test_the_number_of_readers_must_not_show():
    check_role(Shelf, RECIPE, [(Shelf.read, (np.array([1, 0]),))])
    with pytest.raises(ContractBroken, match="neither its rows nor their order"):
        check_role(Shuffled, RECIPE, [(Shuffled.read, (np.array([1, 0]),))])


# ---------------------------------------------------------------------------- broken environments


class Corridor:
    """Two walkers along a line; each leaves at the end, which it reaches after some steps."""

    def __init__(self) -> None:
        self.places = np.zeros((2, 1), np.float32)

    def reset(self, task: float, seed: int) -> np.ndarray:
        self.start = np.random.default_rng(seed).uniform(0, task, size=(2, 1))
        self.places = self.start.astype(np.float32)
        return self.places

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        self.places = self.places + actions["action"]
        done = self.places[:, 0] >= 3
        return Step(self.places, self.places[:, 0] - 1, done, {"wall": self.places[:, 0] < 0})


class OfTheClock(Corridor):
    resets = 0

    def reset(self, task, seed):
        self.resets += 1
        return super().reset(task, seed + self.resets)


class InPlace(Corridor):
    def step(self, actions):
        self.places += actions["action"]
        return super().step({"action": np.float32(0)})


class Clipping(Corridor):
    def step(self, actions):
        np.clip(actions["action"], 0, 0.1, out=actions["action"])
        return super().step(actions)


class Endless(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, done=np.array([True, False]))


class Double(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, rewards=step.rewards.astype(np.float64))


class Widening(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, observations=step.observations.astype(np.float64))


class Shrinking(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, info={} if step.done.any() else step.info)


class OneFlag(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, done=np.array(step.done.all()))


class Namesake(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, info={"reward": step.rewards})


class Transposed(Corridor):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, rewards=step.rewards[:1], done=step.done[:1])


def stride(observations: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
    return {"action": generator.uniform(0.2, 0.9, size=(2, 1)).astype(np.float32)}


def test_a_sound_environment_passes():
    check_environment(Corridor(), 1.0, stride)


@pytest.mark.parametrize(
    ("environment", "law"),
    [
        (OfTheClock(), "equal seeds and actions give equal episodes"),
        (InPlace(), "a step leaves earlier observations and the actions as they are"),
        (Clipping(), "a step leaves earlier observations and the actions as they are"),
        (Endless(), "every episode ends\nfound: 1 go on after 40 steps"),
        (Double(), "rewards are an array of float32\nfound: ndarray of float64"),
        (Widening(), "every array keeps its name, shape and dtype"),
        (Shrinking(), "every array keeps its name, shape and dtype"),
        (OneFlag(), "done is bool and has the shape of the rewards"),
        (Namesake(), "all arrays of an episode's record have names of their own"),
        (Transposed(), "observations and rewards have one batch axis"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Corridor) else "",
)
def test_a_broken_environment_is_told_its_law(environment, law):
    with pytest.raises(ContractBroken, match=law):
        check_environment(environment, 1.0, stride, max_steps=40)


class Relay:
    """A parallel environment as PettingZoo has them; the second agent leaves before the first."""

    possible_agents = ("first", "second")

    def reset(self, seed: int, options: object) -> tuple[dict[str, np.ndarray], dict[str, dict]]:
        self.agents, self.left = list(self.possible_agents), 4
        self.generator = np.random.default_rng(seed)
        return self.observed(), {}

    def observed(self) -> dict[str, np.ndarray]:
        return {agent: self.generator.normal(size=2) for agent in self.agents}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        assert list(actions) == self.agents
        self.left -= 1
        ended = {agent: self.left <= (agent == "second") * 2 for agent in self.agents}
        cut = dict.fromkeys(self.agents, False)
        answer = self.observed(), dict.fromkeys(self.agents, 1.0), ended, cut, {}
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return answer


def test_gymnasium_and_pettingzoo_environments_pass():
    def pushes(observations: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {"action": generator.integers(2, size=len(observations))}

    check_environment(GymnasiumEnvironment("CartPole-v1", num_envs=3), None, pushes)
    check_environment(ParallelEnvironment(Relay()), None, pushes)


# ---------------------------------------------------------------------------- broken workloads


def walk(train: str, /, **changes: Any) -> Workload:
    from toy_package.broken import Walk

    values: dict[str, Any] = {
        "name": "walk",
        "summary": "",
        "paper": "",
        "recipes": {"short": Walk(steps=6, checkpoint_every=2)},
        "train": f"toy_package.broken:{train}",
        "score": "train/place",
        "plots": (Plot(title="Place", metrics=("train/place",), level="place"),),
    }
    return Workload(**{**values, **changes})


def test_a_sound_workload_passes(tmp_path):
    workload = walk("right", spaces={"small": {"seed": "randint(0, 9)"}})
    check_workload(workload, workload.recipe(), tmp_path)


@pytest.mark.parametrize(
    ("workload", "law"),
    [
        (walk("wrong"), r"import paths lead.*unknown name in toy_package\.broken 'wrong'"),
        (walk("_moves"), r"import paths lead to functions and classes\nfound: toy_package"),
        (walk("right", train="nowhere.at:all"), "no module 'nowhere'"),
        (walk("right", roles={"a": "toy_package.broken:Homeless"}), "every role has a family"),
        (walk("right", spaces={"small": {"sede": "randint(0, 9)"}}), r"found: spaces name \['sede"),
        (walk("right", score="eval/place"), r"nothing is called \['eval/place'\]"),
        (
            walk("right", plots=(Plot(title="", metrics=("train/place",), level="start"),)),
            r"nothing is called \['start'\]",
        ),
        (walk("forgetful"), "a stopped run resumes to the numbers.*train/place"),
        (walk("unseeded"), "equal recipes give equal numbers"),
        (walk("deaf"), "leaves at its next report.*asked to stop after step 2"),
        (walk("crashing"), "a short run in one process ends well\nfound: LookupError: no such"),
    ],
    ids=lambda value: value.train.rpartition(":")[2] if isinstance(value, Workload) else "",
)
def test_a_broken_workload_is_told_its_law(tmp_path, workload, law):
    with pytest.raises(ContractBroken, match=f"(?s){law}"):
        check_workload(workload, workload.recipe(), tmp_path)


def test_steps_that_are_not_counted_are_noticed(tmp_path):
    workload = walk("right")
    with pytest.raises(ContractBroken, match=r"from 1 to recipe\.total_steps"):
        check_workload(workload, workload.recipe().override("warm_up=2"), tmp_path)


def test_recipes_of_two_classes_are_refused(tmp_path):
    workload = walk("right")
    with pytest.raises(ContractBroken, match="the given recipe is a Recipe"):
        check_workload(workload, Recipe(steps=6), tmp_path)


def test_a_recipe_that_does_not_survive_its_file_is_refused(tmp_path):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Loose(Recipe):
        rate: Annotated[float, Gt(0)] = 0.0

    workload = walk("right", recipes={"loose": Loose(steps=6)})
    with pytest.raises(ContractBroken, match=r"(?s)survives being.*loose: rate: input should be"):
        check_workload(workload, workload.recipe(), tmp_path)


def test_a_recipe_too_short_to_stop_in_is_refused(tmp_path):
    workload = walk("right")
    with pytest.raises(ValueError, match="at least 3 steps to stop between, found 2"):
        check_workload(workload, workload.recipe().override("steps=2"), tmp_path)


# ---------------------------------------------------------------------------- differences

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.floats(width=32)).map(lambda row: np.array(row, np.float32))
    | st.lists(st.floats(width=32)).map(torch.tensor),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(values)
def test_a_value_does_not_differ_from_its_copy(value):
    from copy import deepcopy

    assert difference(value, deepcopy(value)) is None
    assert difference(value, [value]) is not None


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (1, 1.0, "value: int and float"),
        ([1, 2], [1], "value: 2 and 1 items"),
        ({"a": 1}, {"b": 1}, "value: the key 'a' is in one only"),
        ({"a": (1, 2)}, {"a": (1, 3)}, "value['a'][1]: 2 and 3"),
        (np.zeros(2), np.zeros(2, np.float32), "value: dtype float64 and float32"),
        (np.zeros(2), np.zeros(3), "value: shape (2,) and (3,)"),
        (np.array([1.0, np.nan]), np.array([2.0, np.nan]), "value: 1 of 2 entries differ"),
        (torch.tensor(1.0), torch.tensor(2.0), "value: 1.0 and 2.0"),
        (np.array([[1], "a"], object), np.array([[2], "a"], object), "value[0][0]: 1 and 2"),
        (Job(None, 1), Job(None, 2), "value.seed: 1 and 2"),
        (0.0, float("nan"), "value: 0.0 and nan"),
    ],
)
def test_a_difference_is_named_with_its_place(one, other, said):
    assert difference(one, other) == said


def test_snapshots_of_equal_weights_are_equal():
    arrays = {"w": np.ones(3)}
    assert difference(Weights.of(arrays, 1), Weights.of(arrays, 1)) is None
    assert difference(Weights.of(arrays, 1), Weights.of(arrays, 2)) == "value.version: 1 and 2"


def test_objects_are_compared_by_what_they_hold():
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    assert difference(one, other) is None
    one.normal()
    assert difference(one, other) is not None
