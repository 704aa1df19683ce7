"""Weights: a snapshot that no later change reaches, in one buffer, exact to the bit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heliostat.weights import Weights

arrays = st.dictionaries(
    st.text(min_size=1),
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
)


@given(arrays)
def test_arrays_come_back_exactly_also_through_pickle(given_arrays: dict[str, np.ndarray]) -> None:
    weights = Weights.of(given_arrays, 3)
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
