"""RLlib as a workload: what is refused, what RLlib is told, what stops and kills cost: nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.rllib.workload import OFFLINE, WORKLOAD, RllibRecipe
from heliostat import checkpoint, launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.plain import to_live, to_plain
from heliostat.testing.contracts import check_workload
from heliostat.testing.difference import difference
from heliostat.tracker import read_metrics

SMALL = ("steps=3", "checkpoint_every=1", "eval_every=1", "eval_episodes=2", "target=null")
SMALL += ("draw=false",)
PPO = (*SMALL, "envs=2", "batch=200", "training.num_epochs=1", "training.minibatch_size=100")
SAC = (*SMALL, "batch=16", "iteration_steps=40", "env_args.max_episode_steps=15")
SAC += ("training.num_steps_sampled_before_learning_starts=30",)


def small(name: str, *overrides: str) -> RllibRecipe:
    recipe = WORKLOAD.recipe(name).override(*overrides)
    assert isinstance(recipe, RllibRecipe)
    return recipe


def order(recipe: RllibRecipe, folder: Path, **more: Any) -> Order:
    place = RunFolder(folder)
    return Order(workload=WORKLOAD, spec="rllib", recipe=recipe, folder=place, **more)


def record(env: str, folder: Path, episodes: int) -> str:
    """Records random steps as the offline algorithms read them; returns the folder."""
    environment, rows = gymnasium.make(env), []
    environment.action_space.seed(0)
    for episode in range(episodes):
        observation, _ = environment.reset(seed=episode)
        over = False
        while not over:
            action = environment.action_space.sample()
            following, reward, ended, cut, _ = environment.step(action)
            rows.append(
                {
                    "eps_id": str(episode),
                    "obs": observation.tolist(),
                    "actions": action.tolist(),
                    "rewards": float(reward),
                    "new_obs": following.tolist(),
                    "terminateds": bool(ended),
                    "truncateds": bool(cut),
                }
            )
            observation, over = following, ended or cut
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "steps.parquet")
    return str(folder)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", WORKLOAD.recipes)
def test_every_named_recipe_is_one_that_rllib_accepts(name, tmp_path):
    recipe = WORKLOAD.recipe(name)
    if name in OFFLINE:
        recipe = recipe.override(f"data={record(recipe.env, tmp_path / 'steps', 1)}")
    recipe.check()


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("ppo", "training.clip_parm=0.2", "'training.clip_parm'; did you mean 'training.clip_par"),
        ("sac", "training.clip_param=0.2", "unknown key 'training.clip_param'"),
        ("ppo", "training.lr=0.1", r"training\.lr: the recipe has a field"),
        ("ppo", "training.minibatch_size=9999", "RLlib refuses this recipe: .*minibatch_size"),
        ("ppo", "model.fcnet_hidden=[3]", "did you mean 'model.fcnet_hiddens'"),
        ("ppo", "env=CartPool-v1", r"(?s)env: 'CartPool-v1' cannot be made: .*CartPole"),
        ("ppo", "env=no.such.module:thing", "env: 'no.such.module:thing' cannot be made"),
        ("ppo", "env_args.wind=3", "env: 'CartPole-v1' cannot be made: .*wind"),
        ("ppo", "policies=shared", "policies: 'CartPole-v1' has one agents, found policies=shared"),
        ("ppo-multi", "policies=one", "has 2 agents, found policies=one"),
        ("ppo", "layout.environment.hosts=3", r"envs: expected a multiple of .*hosts=3, found 8"),
        ("ppo", "layout.precision=bfloat16", r"layout\.precision: expected float32"),
        ("bc", "data=", r"data: expected a folder .*found data='' with algorithm=bc"),
        ("bc", "data=nowhere", r"data: expected a folder with \*\.parquet.*none at 'nowhere'"),
        ("ppo", "data=nowhere", "data: expected a folder .* found data='nowhere' with .*ppo"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(name, override, words):
    recipe = WORKLOAD.recipe(name).override(override)
    with pytest.raises(UsageError, match=words):
        recipe.check()


def test_recorded_steps_must_have_every_column(tmp_path):
    pq.write_table(pa.table({"obs": [[1.0]], "rewards": [1.0]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"found obs, rewards; eps_id, actions, .*are missing"):
        WORKLOAD.recipe("bc").override(f"data={tmp_path}").check()


# ---------------------------------------------------------------------------- what RLlib is told


def test_the_layout_decides_about_processes():
    from algorithms.rllib.config import configure

    layout = ("layout.environment.hosts=4", "layout.environment.cpus=2", "layout.learners=2")
    config = configure(small("ppo", *layout, "layout.learner_cpus=3", "layout.max_restarts=7"), 5)
    assert (config.num_env_runners, config.num_cpus_per_env_runner) == (4, 2)
    assert (config.num_learners, config.num_cpus_per_learner) == (2, 3)
    assert config.num_envs_per_env_runner == 2  # eight over four runners
    assert config.max_num_env_runner_restarts == 7
    assert config.seed == 5


def test_one_rate_serves_every_optimiser_unless_told_otherwise():
    from algorithms.rllib.config import configure

    config = configure(small("sac", "lr=0.5", "training.alpha_lr=0.1"), 0)
    assert (config.lr, config.actor_lr, config.critic_lr, config.alpha_lr) == (None, 0.5, 0.5, 0.1)
    assert configure(small("ppo", "lr=0.5"), 0).lr == 0.5


def test_results_come_under_the_platforms_names():
    from heliostat.rllib import metrics_of

    module = {"total_loss": np.float32(2.0), "num_module_steps_trained": 7, "entropy": 0.5}
    sampled = {"episode_return_mean": 20.0, "episode_len_mean": float("nan"), "sample": 1}
    one = {"env_runners": sampled, "learners": {"__all_modules__": {"x": 1}, "p": module}}
    assert metrics_of(one) == {"train/return": 20.0, "train/total_loss": 2.0, "train/entropy": 0.5}
    two = {"learners": {"a": {"vf_loss": 1.0}, "b": {"vf_loss": 2.0}}}
    assert metrics_of(two) == {"train/a/vf_loss": 1.0, "train/b/vf_loss": 2.0}


scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text()
trees = st.recursive(
    scalars
    | st.lists(st.integers(-(2**40), 2**40), min_size=60, max_size=70)
    | st.lists(st.floats(), min_size=60, max_size=70)
    | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=60, max_size=70)
    | st.lists(st.floats(width=32)).map(lambda row: np.array(row, np.float32)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=6,
)


@settings(max_examples=40)  # each writes a checkpoint
@given(trees)
def test_a_state_survives_its_checkpoint(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("state")
    _, found = checkpoint.load(checkpoint.save(folder, 1, {"state": to_plain(tree)}))
    assert difference(to_live(found["state"]), tree) is None


# ---------------------------------------------------------------------------- on a Ray


@pytest.mark.ray
@pytest.mark.parametrize(
    "case", [("ppo", *PPO, "normalise=true"), ("sac", *SAC)], ids=["ppo", "sac"]
)
def test_a_stopped_run_resumes_to_the_same_numbers(ray_cluster, tmp_path, case):
    check_workload(WORKLOAD, small(*case), tmp_path)


@pytest.mark.ray
def test_a_killed_runner_is_replaced_and_training_goes_on(ray_cluster, tmp_path, monkeypatch):
    import ray

    from heliostat.rllib import Algorithm

    layout = ("layout.environment.hosts=2", "layout.environment.cpus=0.5")
    victim = order(small("ppo", *PPO, *layout, "steps=1000"), tmp_path / "a")
    processes: dict[int, int] = {}
    deadline = time.monotonic() + 120
    step = Algorithm.step

    def watched(self: Algorithm) -> dict[str, float]:
        metrics = step(self)
        found = self._rllib.env_runner_group.foreach_env_runner(
            lambda _: (os.getpid(), torch.get_num_threads()), local_env_runner=False
        )
        if len(processes) == 0:
            os.kill(found[0][0], signal.SIGKILL)
        processes.update(found)
        if len(processes) == 3 or time.monotonic() > deadline:
            victim.folder.stop.touch()
        time.sleep(0.2)
        return metrics

    monkeypatch.setattr(Algorithm, "step", watched)
    assert launch.create(victim).stopped
    assert len(processes) == 3, "two, and the one that took a place"
    assert set(processes.values()) == {1}, "as many torch threads as CPUs"
    assert "learner-lost" not in [event["event"] for event in victim.folder.events.read()]
    steps = [row["step"] for row in read_metrics(victim.folder.path)]
    assert steps == list(range(1, len(steps) + 1))
    while ray.available_resources().get("CPU") != 8:
        assert time.monotonic() < deadline, "a stopped run leaves no actor behind"
        time.sleep(0.2)


@pytest.mark.ray
def test_an_environment_that_raises_ends_the_run(ray_cluster, tmp_path):
    shaky = ("env=toy_package.faulty:shaky", "env_args.steps=30")
    with pytest.raises(RuntimeError) as caught:
        launch.create(order(small("ppo", *PPO, *shaky), tmp_path / "a"))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    events = RunFolder(tmp_path / "a").events.read()
    assert [event["event"] for event in events].count("attempt") == 1
    assert events[-1]["event"] == "failed"


@pytest.mark.ray
def test_equal_weights_and_filters_evaluate_alike_on_another_number_of_runners(
    ray_cluster, tmp_path
):
    from functools import partial

    from algorithms.rllib.config import configure, make
    from heliostat.rllib import Algorithm

    def algorithm(*overrides: str) -> Algorithm:
        recipe = small("ppo", *PPO, "normalise=true", *overrides)
        return Algorithm(configure(recipe, 1), partial(make, recipe), recipe.layout)

    with algorithm() as one:
        one.begin_anew(3)
        one.step()
        played = one.evaluate([7, 8], 500)
        assert difference(one.evaluate([7, 8], 500), played) is None
        path = checkpoint.save(tmp_path, 1, one.state())
        rate = one.step()["train/default_optimizer_learning_rate"]
    _, state = checkpoint.load(path)
    hosts = ("layout.environment.hosts=1", "layout.environment.cpus=0.5")
    with algorithm(*hosts, "lr=0.5") as other:
        other.load(state)
        assert difference(other.evaluate([7, 8], 500), played) is None
        pipelines = ["env_to_module_connector"]
        (held,) = other._rllib.env_runner_group.foreach_env_runner(
            lambda runner: runner.get_state(components=pipelines), local_env_runner=False
        )
        kept = to_live(state["runner"])["env_to_module_connector"]
        assert difference(to_plain(held["env_to_module_connector"]), to_plain(kept)) is None
        assert rate == pytest.approx(1e-3)
        changed = other.step()["train/default_optimizer_learning_rate"]
        assert changed == 0.5  # the recipe's, not the checkpoint's


@pytest.mark.ray
@pytest.mark.parametrize("name", OFFLINE)
def test_recorded_steps_are_learnt_from(ray_cluster, tmp_path, name):
    env = WORKLOAD.recipe(name).env
    data = record(env, tmp_path / "steps", 2)
    recipe = small(name, *SMALL, f"data={data}", "updates=2", "batch=32", "steps=1")
    outcome = launch.create(order(recipe, tmp_path / "a"))
    (row,) = read_metrics(outcome.folder)
    assert np.isfinite(row["train/total_loss"])
    assert outcome.metrics["eval/return"] == row["eval/return"]


@pytest.mark.ray
def test_several_agents_share_a_policy_until_the_target_is_reached(ray_cluster, tmp_path):
    recipe = small("ppo-multi", *PPO, "target=1", "draw=true")
    outcome = launch.create(order(recipe, tmp_path / "a"))
    assert outcome.metrics["steps"] == 1
    assert (outcome.folder / "checkpoints" / "step-0000000001").is_dir()
    assert outcome.metrics["eval/return"] > 2
    assert json.loads((outcome.folder / "result.json").read_text())["eval/length"] > 1
