"""A run on a cluster of several nodes on this machine, of which one dies and another comes.

Started by a test as a process of its own, since a process belongs to one Ray.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from toy_package.workload import WORKLOAD

from heliostat import launch
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Layout
from heliostat.tracker import read_metrics

LAYOUT = Layout(learners=2, min_learners=1, resize_every_s=3, start_deadline_s=60)
HEALTH = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}


def main(folder: RunFolder) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH},
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    recipe = replace(
        WORKLOAD.recipe(), steps=int(sys.argv[2]), checkpoint_every=5, pause_s=0.3, layout=LAYOUT
    )
    spec = "toy_package.workload:WORKLOAD"
    order = Order(workload=WORKLOAD, spec=spec, recipe=recipe, folder=folder)
    run = threading.Thread(target=launch.create, args=(order,))
    run.start()

    def reached(world: int, rows: int) -> bool:
        """Whether ``rows`` more steps were logged since the run last began with ``world`` ranks."""
        begun = [e for e in folder.events.read() if e["event"] in ("began", "restored")]
        new = [r for r in read_metrics(folder.path) if begun and r["time"] > begun[-1]["time"]]
        return bool(begun) and begun[-1]["world"] == world and len(new) >= rows

    def wait_for(world: int) -> None:
        while run.is_alive() and not reached(world, 8):
            time.sleep(0.2)

    wait_for(world=2)
    cluster.remove_node(nodes[1], allow_graceful=False)
    wait_for(world=1)
    cluster.add_node(num_cpus=1)
    wait_for(world=2)
    run.join()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
