"""The Ray that a run uses: one that is there, or a private local one; and whether it is enough."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import ray

from heliostat.errors import UsageError
from heliostat.recipe import Layout

logger = logging.getLogger("heliostat")


@contextmanager
def ray_session(address: str | None) -> Generator[None]:
    """Connects to Ray for the length of a run.

    An existing connection is used as it is. Otherwise ``address``, or the RAY_ADDRESS variable,
    names a cluster; with neither, a private local Ray is started with a token and a temporary
    folder of its own, and stopped at the end. Other Ray processes on the host are not touched.

    Raises:
        UsageError: the address cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    folder = None if address else tempfile.mkdtemp(prefix="heliostat-")
    try:
        with _token(local=address is None):
            _connect(address, folder)
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _token(local: bool) -> Generator[None]:
    """Turns token authentication on; a local Ray gets a fresh token that only it knows."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and os.environ["RAY_AUTH_MODE"] == "token" and not given:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    yield


def _connect(address: str | None, folder: str | None) -> None:
    settings: dict[str, Any] = {
        "logging_level": logging.WARNING,
        "log_to_driver": True,
        "configure_logging": True,
        "include_dashboard": True,
    }
    if folder is not None:
        settings |= {"address": "local", "_temp_dir": folder, "num_cpus": os.cpu_count()}
    else:
        settings = {"address": address, "logging_level": logging.WARNING}
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError) as error:
        raise UsageError(
            f"expected a Ray cluster at {address or 'this machine'}, found none: {error}; "
            "check the address and RAY_AUTH_TOKEN, or leave both out for a local Ray"
        ) from error


@dataclass(frozen=True, slots=True)
class _Demand:
    what: str
    count: int
    cpus: float
    gpus: float


def check_layout(layout: Layout, roles: Mapping[str, str]) -> None:
    """Refuses a layout that the connected cluster can never hold.

    Args:
        layout: what is asked for.
        roles: pool name -> family, of the pools that will be started.

    Raises:
        UsageError: a table of what is requested beside what there is.
    """
    nodes = [
        cast("dict[str, float]", node["Resources"])
        for node in cast("list[dict[str, Any]]", ray.nodes())
        if node["Alive"]
    ]
    demands = list(_demands(layout, roles))
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
    best = {kind: max((n.get(kind, 0) for n in nodes), default=0) for kind in ("CPU", "GPU")}
    free = cast("dict[str, float]", ray.available_resources())
    asked = {
        "CPU": sum(demand.count * demand.cpus for demand in demands),
        "GPU": sum(demand.count * demand.gpus for demand in demands),
    }
    fits = all(asked[kind] <= total[kind] for kind in asked) and all(
        demand.cpus <= best["CPU"] and demand.gpus <= best["GPU"] for demand in demands
    )
    if fits:
        return
    rows = [f"  {'requested':<24}{'count':>6}{'CPUs each':>11}{'GPUs each':>11}"]
    rows += [f"  {d.what:<24}{d.count:>6}{d.cpus:>11g}{d.gpus:>11g}" for d in demands]
    rows += [f"  {'':<24}{'':>6}{'CPUs':>11}{'GPUs':>11}"]
    for label, amounts in (
        ("requested in all", asked),
        ("in the cluster", total),
        ("on its largest node", best),
        ("free now", {kind: free.get(kind, 0.0) for kind in asked}),
    ):
        rows.append(f"  {label:<30}{amounts['CPU']:>11g}{amounts['GPU']:>11g}")
    raise UsageError(
        "the layout does not fit the cluster; lower layout.* or take layout=in_process\n"
        + "\n".join(rows)
    )


def _demands(layout: Layout, roles: Mapping[str, str]) -> Generator[_Demand]:
    if layout.learners:
        count = layout.min_learners or layout.learners
        yield _Demand("learners", count, layout.learner_cpus, layout.learner_gpus)
    families = dict(layout.families())
    for name, family in roles.items():
        hosts = families[cast("Any", family)]
        if hosts.hosts:
            yield _Demand(f"{name} ({family})", hosts.hosts, hosts.cpus, hosts.gpus)
