"""The Ray that a run uses: one that is there, or a private local one; and whether it is enough."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from heliostat.errors import RunFailed, UsageError
from heliostat.layout import Hosts, Layout, demands

if "ray" not in sys.modules:
    # Ray reads this once, when it is imported; without it an explicit address never sends a token.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
import ray
import torch
from ray.exceptions import AuthenticationError

Nodes = Sequence[Mapping[str, float]]
"""Resources of each node, such as ``{"CPU": 8, "GPU": 1}``."""


@contextmanager
def ray_session(
    address: str | None, check: Callable[[Nodes], None], *, dashboard: bool = True
) -> Generator[str | None]:
    """Connects to Ray for the length of a run.

    An existing connection is used as it is. Otherwise ``address``, or the RAY_ADDRESS variable,
    names a cluster; with neither, a private local Ray is started with a token and a temporary
    folder of its own, and stopped at the end. Other Ray processes on the host are not touched.

    Args:
        address: a cluster's address, or None.
        check: called with the nodes, before a local Ray is started; raises to refuse them.
        dashboard: whether a local Ray has one; Ray Train cleans up after itself only with one.

    Yields:
        ``host:port`` of the dashboard where this call connected, and None otherwise.

    Raises:
        UsageError: the address cannot be reached, or what ``check`` raises.
    """
    if ray.is_initialized():
        check(_nodes())
        yield None
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        check([{"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}])
    folder = None if address else tempfile.mkdtemp(prefix="heliostat-")
    try:
        url = _connect(address, folder, dashboard)
        check(_nodes())
        yield url
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str | None, folder: str | None, dashboard: bool) -> str | None:
    settings: dict[str, Any] = {"address": address, "logging_level": logging.WARNING}
    if address is not None:  # Ray Train's cleaner else looks for any Ray on its host
        settings["runtime_env"] = {"env_vars": {"RAY_ADDRESS": address}}
    if folder is not None:
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # known to this Ray alone
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody preempts us
        settings |= {
            "address": "local",
            "num_cpus": os.cpu_count(),
            "include_dashboard": dashboard,
            "_temp_dir": folder,
        }
    try:
        return ray.init(**settings).dashboard_url
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        if folder is not None:
            raise RunFailed(f"a local Ray could not start: {error}") from error
        raise UsageError(
            f"expected a Ray cluster at {address}, found none: {error}; "
            "check the address and RAY_AUTH_TOKEN, or leave both out for a local Ray"
        ) from error


def check_layout(layout: Layout, pools: Mapping[str, Hosts], nodes: Nodes) -> None:
    """Refuses a layout that the nodes can never hold.

    Args:
        layout: what is asked for.
        pools: the host actors of each pool that will be started.
        nodes: what there is.

    Raises:
        UsageError: a table of what is requested beside what there is.
    """
    wanted = demands(layout, pools)
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
    best = {kind: max((n.get(kind, 0) for n in nodes), default=0) for kind in ("CPU", "GPU")}
    asked = {
        "CPU": sum(demand.count * demand.cpus for demand in wanted),
        "GPU": sum(demand.count * demand.gpus for demand in wanted),
    }
    fits = all(asked[kind] <= total[kind] for kind in asked) and all(
        demand.cpus <= best["CPU"] and demand.gpus <= best["GPU"] for demand in wanted
    )
    if fits:
        return
    rows = [f"  {'requested':<24}{'count':>6}{'CPUs each':>11}{'GPUs each':>11}"]
    rows += [f"  {d.what:<24}{d.count:>6}{d.cpus:>11g}{d.gpus:>11g}" for d in wanted]
    rows += [f"  {'':<24}{'':>6}{'CPUs':>11}{'GPUs':>11}"]
    for label, amounts in (
        ("requested in all", asked),
        ("in the cluster", total),
        ("on its largest node", best),
    ):
        rows.append(f"  {label:<30}{amounts['CPU']:>11g}{amounts['GPU']:>11g}")
    raise UsageError(
        "the layout does not fit the cluster; lower layout.* or take layout=in_process\n"
        + "\n".join(rows)
    )


def _nodes() -> Nodes:
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [node["Resources"] for node in nodes if node["Alive"]]
