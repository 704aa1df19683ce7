"""Weights: a snapshot that no later change reaches, in one buffer, exact to the bit."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heliostat.errors import WeightsDiffer
from heliostat.layout import Layout
from heliostat.learner import Learner
from heliostat.weights import Weights

arrays = st.dictionaries(
    st.text(min_size=1),
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
)


@given(arrays, st.sampled_from([64, 128, 1 << 20]))
def test_arrays_come_back_exactly_from_any_buckets_also_through_pickle(
    given_arrays: dict[str, np.ndarray], bucket_bytes: int
) -> None:
    weights = Weights.of(given_arrays, 3, bucket_bytes)
    assert weights.key == Weights.of(given_arrays, 4).key
    for copy in (weights, pickle.loads(pickle.dumps(weights, protocol=5))):
        assert copy.version == 3
        assert copy.key == weights.key
        found = dict(copy.arrays())
        assert list(found) == list(given_arrays)
        for name, array in given_arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_a_snapshot_does_not_follow_the_module() -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    weights = Weights.of_tensors(module.state_dict(), 0)
    with torch.no_grad():
        module.weight.add_(1.0)
    weights.load_into(module)
    assert torch.equal(module.weight, before)


def test_a_snapshot_cannot_be_written_to() -> None:
    weights = Weights.of({"w": np.ones(3)}, 0)
    (_, array), *_ = weights.arrays()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2.0


def test_loading_into_a_module_leaves_the_module_independent() -> None:
    module = torch.nn.Linear(2, 2)
    weights = Weights.of_tensors(module.state_dict(), 0)
    weights.load_into(module)
    with torch.no_grad():
        module.weight.fill_(5.0)
    other = torch.nn.Linear(2, 2)
    weights.load_into(other)
    assert not torch.equal(other.weight, module.weight)


def test_names_that_differ_are_refused() -> None:
    weights = Weights.of_tensors(torch.nn.Linear(2, 2, bias=False).state_dict(), 0)
    with pytest.raises(KeyError, match=r"differ in 1 names, first \['bias'\]"):
        weights.load_into(torch.nn.Linear(2, 2))


def test_bfloat16_travels_as_float32_and_returns_exactly() -> None:
    module = torch.nn.Linear(3, 3).bfloat16()
    before = module.weight.detach().clone()
    weights = Weights.of_tensors(module.state_dict(), 0)
    with torch.no_grad():
        module.weight.zero_()
    weights.load_into(module)
    assert torch.equal(module.weight, before)


def test_a_bucket_never_splits_a_number() -> None:
    with pytest.raises(ValueError, match="multiple of 64, found 100"):
        Weights.of({"w": np.ones(3)}, 0, bucket_bytes=100)


def test_equal_values_have_one_digest_and_any_change_another() -> None:
    first = {"a": np.arange(4, dtype=np.float32), "b": np.zeros((2, 3))}
    key = Weights.of(first, 0).key
    changed = first["a"].copy()
    changed[3] = np.nextafter(changed[3], np.float32(9))
    for other in (
        {**first, "a": changed},
        {"c": first["a"], "b": first["b"]},
        {**first, "b": first["b"].reshape(3, 2)},
        {**first, "b": first["b"].astype(np.float32)},
    ):
        assert Weights.of(other, 0).key != key


class Counted:
    """A bucket in a store: each read maps it anew, as Ray does, and one may look who is mapped."""

    live = 0
    most = 0

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def read(self) -> np.ndarray:
        mapped = self._data.copy()
        Counted.live += 1
        Counted.most = max(Counted.most, Counted.live)
        weakref.finalize(mapped, Counted.dropped)
        return mapped

    @staticmethod
    def dropped() -> None:
        Counted.live -= 1


def test_a_receiver_holds_its_model_and_one_bucket() -> None:
    gc.disable()  # what a cycle would keep must not go unnoticed
    try:
        module = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
        weights = Weights.of_tensors(module.state_dict(), 0, bucket_bytes=4096).moved(Counted)
        assert len(weights.buckets) == 7
        weights.load_into(module)
        assert (Counted.most, Counted.live) == (1, 0)
        weights.load_into(module)
        assert Counted.most == 1
    finally:
        gc.enable()


def test_a_model_that_holds_other_values_after_the_load_is_refused() -> None:
    """bfloat16 cannot hold what was sent: silently rounded weights would be another policy."""
    weights = Weights.of_tensors(torch.nn.Linear(3, 3).state_dict(), 8)
    with pytest.raises(WeightsDiffer, match="version 8: the learner sent weights of digest"):
        weights.load_into(torch.nn.Linear(3, 3).bfloat16())


def test_steps_that_never_reach_what_is_sent_are_refused() -> None:
    """An optimiser of other parameters than those that are sent trains for nobody."""
    elsewhere = torch.nn.Linear(2, 1)

    def wrong(_: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(elsewhere.parameters(), lr=0.1)

    def right(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    model, device = torch.nn.Linear(2, 1), torch.device("cpu")
    for optimizer, refused in ((right, False), (wrong, True)):
        learner = Learner(model, optimizer, Layout.in_process(), device, world=1)
        learner.weights(0)
        learner.backward(learner.forward(torch.ones(1, 2)).sum())
        assert learner.step() > 0
        if refused:
            with pytest.raises(WeightsDiffer, match="version 1: expected weights changed by steps"):
                learner.weights(1)
        else:
            assert learner.weights(1).key == learner.weights(1).key
