"""Checkpoints: whole or not there, exact, and never code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heliostat import checkpoint
from heliostat.errors import CheckpointCorrupt

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text()
    | st.lists(st.floats(width=32, allow_nan=False), min_size=1).map(torch.tensor)
)
keys = st.text() | st.integers(-5, 5)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and one == other


@settings(max_examples=25)  # each one waits for the disk
@given(st.dictionaries(keys, trees))
def test_a_state_comes_back_exactly(tmp_path_factory: Any, state: dict[Any, Any]) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    step, loaded = checkpoint.load(checkpoint.save(folder, 7, state))
    assert step == 7
    assert same(state, loaded)


def test_an_optimiser_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 2)
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.zeros_(model.bias)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def advance(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(torch.full((3, 4), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight = made()
    advance(*straight, range(10))
    broken = made()
    advance(*broken, range(5))
    state = {"model": broken[0].state_dict(), "optimizer": broken[1].state_dict()}
    _, loaded = checkpoint.load(checkpoint.save(tmp_path, 5, state))
    resumed = made()
    resumed[0].load_state_dict(loaded["model"])
    resumed[1].load_state_dict(loaded["optimizer"])
    advance(*resumed, range(5, 10))
    assert torch.equal(straight[0].weight, resumed[0].weight)


def test_shared_storage_and_views_are_saved_as_seen(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = {"all": base, "column": base[:, 1], "turned": base.T, "array": np.arange(3)}
    _, loaded = checkpoint.load(checkpoint.save(tmp_path, 1, state))
    assert torch.equal(loaded["column"], torch.tensor([1.0, 4.0]))
    assert torch.equal(loaded["turned"], base.T)
    assert loaded["array"].tolist() == [0, 1, 2]


def test_a_leaf_that_would_need_pickling_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state/a/1: expected a tensor.*found set"):
        checkpoint.save(tmp_path, 1, {"a": [1, {2}]})
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "COMPLETE"])
@pytest.mark.parametrize("fault", ["missing", "cut", "flipped"])
def test_a_damaged_checkpoint_is_skipped_and_named(
    tmp_path: Path, name: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, 1, {"x": torch.ones(4)})
    path = checkpoint.save(tmp_path, 2, {"x": torch.zeros(4)}) / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if fault == "cut":
        path.write_bytes(content[:-3])
    elif fault == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == 1
    assert "step-0000000002" in caplog.text


def test_loading_a_damaged_checkpoint_by_name_raises(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": 1})
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointCorrupt, match="step-0000000001 is not whole"):
        checkpoint.load(path)


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step, score in enumerate([0.1, 0.9, None, 0.5, float("nan"), 0.2], start=1):
        checkpoint.save(tmp_path, step, {}, score)
    checkpoint.prune(tmp_path, keep=2, newest=6)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["2", "4", "6"]


def test_the_best_has_the_highest_score_and_else_is_the_newest(tmp_path: Path) -> None:
    for step, score, best in [(1, None, 1), (2, None, 2), (3, 0.5, 3), (4, 0.2, 3), (5, 0.5, 5)]:
        checkpoint.save(tmp_path, step, {}, score)
        assert checkpoint.best(tmp_path).name == f"step-{best:010d}"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, {"x": 1})
    checkpoint.save(tmp_path, 3, {"x": 2})
    checkpoint.prune(tmp_path, keep=1, newest=3)
    assert checkpoint.latest(tmp_path) == (3, {"x": 2})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from pathlib import Path; from heliostat import checkpoint\n"
        "folder = Path(sys.argv[1]); checkpoint.save(folder, 1, {'x': torch.ones(2)})\n"
        "state = {str(i): torch.ones(4_000_000) for i in range(8)}\n"
        "print('go', flush=True)\n"
        "for step in range(2, 99): checkpoint.save(folder, 2, state)\n"
    )
    for delay in (0.0, 0.03, 0.1):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        while not list(tmp_path.glob(".partial-0000000002-*")):
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found[0] in {1, 2}
        checkpoint.prune(tmp_path, keep=1, newest=found[0])
        assert not list(tmp_path.glob(".partial-*"))


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": torch.ones(2), "y": (1, "a")})
    assert sorted(file.name for file in path.iterdir()) == [
        "COMPLETE",
        "state.json",
        "state.safetensors",
    ]
    json.loads((path / "state.json").read_text())


def test_pruning_keeps_what_was_just_saved_and_drops_a_course_that_was_left(tmp_path: Path) -> None:
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.95)):
        path = checkpoint.save(tmp_path, step, {"x": torch.ones(4)}, score)
        if step > 10:
            (path / "state.safetensors").write_bytes(b"damaged")
    checkpoint.save(tmp_path, 15, {"x": torch.zeros(4)}, 0.4)
    checkpoint.prune(tmp_path, keep=1, newest=15)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == 15
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["10", "15"]


def test_paths_that_read_alike_do_not_overwrite_each_other(tmp_path: Path) -> None:
    state = {
        "a/b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        0: torch.ones(1),
        "0": torch.zeros(1),
    }
    _, loaded = checkpoint.load(checkpoint.save(tmp_path, 1, state))
    assert same(state, loaded)


def test_a_fork_takes_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    checkpoint.save(trunk, 1, {"x": 1})
    (checkpoint.save(trunk, 2, {"x": 2}) / "state.json").write_text("{}")
    checkpoint.fork(trunk, None, branch)
    assert checkpoint.latest(branch) == (1, {"x": 1})
    with pytest.raises(CheckpointCorrupt):
        checkpoint.fork(trunk, 2, tmp_path / "other")
