"""A layout is compared with a cluster before anything is started on it."""

from __future__ import annotations

import pytest

from heliostat.errors import UsageError
from heliostat.layout import Hosts, Layout
from heliostat.ray_session import check_layout

POOLS = {"samplers": Hosts(hosts=2, cpus=2), "judges": Hosts(hosts=1, cpus=0), "rows": Hosts()}


def test_what_fits_is_taken() -> None:
    check_layout(Layout(learners=2), POOLS, [{"CPU": 3}, {"CPU": 3}])
    check_layout(Layout(), {}, [])


@pytest.mark.parametrize(
    "nodes",
    [
        [{"CPU": 5.0}],  # too few in all
        [{"CPU": 1.0}] * 9,  # none holds a sampler
    ],
)
def test_what_can_never_fit_is_refused_with_both_sides(nodes: list[dict[str, float]]) -> None:
    with pytest.raises(UsageError, match=r"lower layout\.\* or take layout=in_process") as caught:
        check_layout(Layout(learners=2), POOLS, nodes)
    table = [line.split() for line in str(caught.value).splitlines()[1:]]
    total, best = sum(node["CPU"] for node in nodes), max(node["CPU"] for node in nodes)
    assert table == [
        ["requested", "count", "CPUs", "each", "GPUs", "each"],
        ["learners", "2", "1", "0"],
        ["samplers", "hosts", "2", "2", "0"],
        ["judges", "hosts", "1", "0", "0"],
        ["CPUs", "GPUs"],
        ["requested", "in", "all", "6", "0"],
        ["in", "the", "cluster", f"{total:g}", "0"],
        ["on", "its", "largest", "node", f"{best:g}", "0"],
    ]


def test_gpus_are_counted_apart() -> None:
    layout = Layout(learners=1, learner_gpus=1)
    check_layout(layout, {}, [{"CPU": 1, "GPU": 1}])
    with pytest.raises(UsageError, match="does not fit"):
        check_layout(layout, {}, [{"CPU": 64}])
