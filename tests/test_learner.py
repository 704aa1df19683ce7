"""Learners: two ranks learn what one does, sharded or not, also over a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import learner_ranks
import pytest
import torch

from heliostat.deepspeed_learner import DeepSpeedLearner
from heliostat.errors import UsageError
from heliostat.layout import Layout

TORCH = ["ddp", "fsdp", "fsdp-checkpointing"]
ZERO = ["zero1", "zero2", "zero3", "zero3-checkpointing"]
ALONE = learner_ranks.LAYOUTS["zero2"]
"""In one process it takes no DeepSpeed."""


def test_a_checkpoint_in_the_middle_changes_no_bit(tmp_path: Path) -> None:
    straight = learner_ranks.train(Layout())
    resumed = learner_ranks.train(Layout(), folder=tmp_path)
    assert resumed["norms"] == straight["norms"]
    for name, value in straight["weights"].items():
        assert torch.equal(value, resumed["weights"][name])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    learner_ranks.start(TORCH, folder)
    return folder


@pytest.fixture(scope="module")
def zero_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed", reason="pip install 'heliostat[deepspeed]'")
    folder = tmp_path_factory.mktemp("zero")
    for name in ZERO:
        learner_ranks.train(ALONE, folder=folder / name / "half")
    learner_ranks.start([*ZERO, "zero2-bfloat16"], folder)
    return folder


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    paths = [folder / name / f"rank-{rank}.pt" for rank in range(2)]
    return [torch.load(path, weights_only=True) for path in paths]


def assert_alike(two: dict[str, Any], one: dict[str, Any], first: int = 0) -> None:
    assert two["losses"] == pytest.approx(one["losses"][first:], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"][first:], rel=1e-4)
    assert two["weights"].keys() == one["weights"].keys()
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_two_ranks_learn_what_one_does(ranks: Path, name: str) -> None:
    one = learner_ranks.train(Layout())
    for two in results(ranks, name):
        assert_alike(two, one)
    assert set(results(ranks, name)[0]["full"]) == set(one["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_two_zero_ranks_learn_what_one_process_does(zero_ranks: Path, name: str) -> None:
    one = learner_ranks.train(ALONE)
    for two in results(zero_ranks, name):
        assert_alike(two, one)
        assert (two["held"] < one["held"] / 10) == name.startswith("zero3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_zero_goes_on_from_one_process_and_one_process_from_zero(
    zero_ranks: Path, name: str
) -> None:
    one = learner_ranks.train(ALONE)
    half = learner_ranks.SWITCH
    for two in results(zero_ranks, name):
        assert_alike(two["resumed"], one, half)
    assert_alike(learner_ranks.train(ALONE, begin=zero_ranks / name / "checkpoints"), one, half)


@pytest.mark.slow
def test_zero_in_half_precision_stays_close(zero_ranks: Path) -> None:
    one = learner_ranks.train(ALONE)
    for two in results(zero_ranks, "zero2-bfloat16"):
        assert two["losses"] == pytest.approx(one["losses"], rel=0.05)
        assert two["losses"] != pytest.approx(one["losses"], rel=1e-4)
        assert all(value.dtype == torch.float32 for value in two["weights"].values())


def test_deepspeed_is_refused_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliostat.layout.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'heliostat\[deepspeed\]', or take fsdp"):
        learner_ranks.ZERO.check()


def test_deepspeed_refuses_several_optimisers() -> None:
    with pytest.raises(UsageError, match=r"found \['AdamW', 'SGD'\]"):
        DeepSpeedLearner(
            learner_ranks.Net(4), learner_ranks.optimizers, ALONE, torch.device("cpu"), world=2
        )


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
