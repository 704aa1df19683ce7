"""Learners: two ranks learn what one does, sharded or not, also over a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import learner_ranks
import pytest
import torch

from heliostat.layout import Layout


def test_a_checkpoint_in_the_middle_changes_no_bit(tmp_path: Path) -> None:
    straight = learner_ranks.train(Layout(), 0, 1, None)
    resumed = learner_ranks.train(Layout(), 0, 1, tmp_path)
    assert resumed["norms"] == straight["norms"]
    for name, value in straight["weights"].items():
        assert torch.equal(value, resumed["weights"][name])


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_two_ranks_learn_what_one_does(tmp_path: Path, parallelism: str) -> None:
    address = f"file://{tmp_path / 'meeting'}"
    script = Path(learner_ranks.__file__)
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", parallelism, address, tmp_path])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    one = learner_ranks.train(Layout(), 0, 1, None)
    for rank in range(2):
        two = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
        for name, value in one["weights"].items():
            torch.testing.assert_close(two["weights"][name], value, rtol=1e-4, atol=1e-6)
    first = torch.load(tmp_path / "rank-0.pt", weights_only=True)
    assert set(first["full"]) == set(one["weights"])


def test_half_precision_products_keep_full_precision_weights() -> None:
    learner = learner_ranks.learner(Layout(precision="bfloat16"), 1)
    rows, _ = learner_ranks.batch(0)
    with learner.autocast():
        assert learner.forward(rows).dtype == torch.bfloat16
    assert all(weight.dtype == torch.float32 for weight in learner.model.parameters())


def test_a_restart_forgets_what_the_optimiser_knew() -> None:
    learner = learner_ranks.learner(Layout(), 1)
    rows, targets = learner_ranks.batch(0)
    learner.backward((learner.forward(rows) - targets).square().mean())
    learner.step()
    assert learner.state()["optimizer"]["state"]
    learner.restart(learner_ranks.optimizers)
    assert learner.state()["optimizer"] == {}


def test_asking_a_fresh_learner_for_its_state_changes_nothing() -> None:
    asked, other = (learner_ranks.learner(Layout(), 1) for _ in range(2))
    saved = asked.state()
    loaded = learner_ranks.learner(Layout(), 1)
    loaded.load(saved)
    rows, targets = learner_ranks.batch(0)
    for learner in (asked, other, loaded):
        learner.backward((learner.forward(rows) - targets).square().mean())
        learner.step()
    for name, value in other.model.state_dict().items():
        assert torch.equal(asked.model.state_dict()[name], value)
        assert torch.equal(loaded.model.state_dict()[name], value)


def test_a_loaded_learner_keeps_its_own_rates() -> None:
    saved = learner_ranks.learner(Layout(), 1)
    rows, targets = learner_ranks.batch(0)

    def step(learner: learner_ranks.Learner[learner_ranks.Net]) -> None:
        learner.backward((learner.forward(rows) - targets).square().mean())
        learner.step()

    step(saved)
    other = learner_ranks.learner(Layout(), 1)
    other.restart(lambda model: torch.optim.SGD(model.parameters(), lr=7.0))
    step(other)
    fresh = learner_ranks.learner(Layout(), 1)
    fresh.restart(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    fresh.load(other.state())
    before = {name: value.clone() for name, value in fresh.model.state_dict().items()}
    step(fresh)
    assert all(torch.equal(before[name], value) for name, value in fresh.model.state_dict().items())
