"""Submitting: a run's folder and sources go to a cluster, where a supervisor sees it through."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.head import Head, own_head_token, start_head
from cluster.jobs import Cluster, Job, named_clusters, remember_cluster
from cluster.packing import pack
from cluster.places import open_run
from cluster.records import as_text, read_object
from heliostat.errors import HeliostatError, UsageError
from heliostat.folder import RunFolder, replace_text
from heliostat.launch import Order, forget, prepare
from heliostat.mirror import Mirror
from heliostat.provenance import packages_of
from heliostat.ray_session import check_layout
from heliostat.workload import pool_hosts

_FORWARDED = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "MUJOCO_GL")
"""Variables that a job gets from the submitting shell; keys and tokens are the cluster's own."""
_STOP_WAIT_S = "20"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """What goes to the cluster beside the run's folder."""

    place: str
    """Of run folders, as the job must see it: ``--runs``."""
    extra: Sequence[Path] = ()
    secrets: bool = False
    say: Callable[[str], None] = print


@dataclass(frozen=True, slots=True)
class Submission:
    """A run that was submitted, and where."""

    folder: RunFolder
    cluster: Cluster
    job_id: str
    """The run's name; ``NAME.2`` and so on after each ``resume``, since Ray's monitor of a job that
    has just ended takes another of the same name for it."""

    def job(self) -> Job | None:
        """Returns what the cluster says of it; None where it, or its private head, knows nothing.

        Raises:
            UsageError: the cluster cannot be asked.
        """
        head = as_text(read_object(self.folder.job).get("head"))
        if head and not Head(Path(head)).is_up():  # it ended after its last job, or is elsewhere
            return None
        try:
            return self.cluster.job(self.job_id)
        except UsageError:
            if head and not Head(Path(head)).is_up():  # it has just ended
                return None
            raise


def submit(order: Order, shipment: Shipment) -> Submission:
    """Submits a new run; submitting an equal one of the same name again finds the first.

    Raises:
        UsageError: the name is taken by another run, the cluster does not answer, is of another
            version or too small, or something must not be shipped.
        RunFailed: a local Ray could not start, or the cluster refused the job.
    """
    if (found := find_submission(_seen(order.folder))) is not None:
        return _same(order, found, shipment)
    with _packed(order, shipment) as package:
        cluster, head = _cluster(order)
        if (job := cluster.job(order.folder.name)) is not None:
            raise UsageError(
                f"the name {order.folder.name!r} is taken at {cluster.address} by a job of other "
                f"run folders, which is {job.state}; choose another --name"
            )
        prepare(order)
        try:
            return _send(order, shipment, package, cluster, head)
        except BaseException:
            if _is_surely_not_there(cluster, order.folder.name):
                forget(order.folder)
                if head is not None:
                    head.end()
            raise


def resubmit(order: Order, shipment: Shipment) -> Submission:
    """Submits a run again, which goes on from its newest checkpoint.

    Raises:
        UsageError: it is still running, or as ``submit``.
        RunFailed: as ``submit``.
    """
    folder, seen = order.folder, _seen(order.folder)
    found = find_submission(seen)
    job = found.job() if found else None
    if found and job and not job.ended:
        raise UsageError(f"run {folder.name!r} is {job.state} at {found.cluster.address}")
    with _packed(order, shipment) as package:
        address = order.address
        if found and address is None and not read_object(seen.job).get("head"):
            address = found.cluster.address
        cluster, head = _cluster(replace(order, address=address))
        if folder.url:
            Mirror(folder, "launch").ask_to_stop(asked=False)
            folder.path.mkdir(parents=True, exist_ok=True)
            Mirror(folder, "launch").pull(heavy=False)
        folder.stop.unlink(missing_ok=True)
        return _send(order, shipment, package, cluster, head)


@contextmanager
def _packed(order: Order, shipment: Shipment) -> Generator[Path]:
    """Gathers what is sent in a folder that lasts as long as the context, and tells its size."""
    with tempfile.TemporaryDirectory(prefix="heliostat-") as scratch:
        package = Path(scratch) / "package"
        packages = packages_of(order.workload, order.spec)
        packed = pack(packages, shipment.extra, package, secrets=shipment.secrets)
        shipment.say(packed.describe())
        yield package


def find_submission(folder: RunFolder) -> Submission | None:
    """Returns where a run was submitted, None where it was not; asks no cluster.

    The folder may come from elsewhere, so that its word alone opens no door: a token goes only to
    a private head of this user, or to the address that RAY_API_SERVER_ADDRESS or the list of
    clusters that this user has named holds.
    """
    job = read_object(folder.job)
    address, head = as_text(job.get("address")), as_text(job.get("head"))
    if not address:
        return None
    token = None if address in named_clusters() else ""
    if head:
        token = own_head_token(Path(head), address) or ""
    job_id = as_text(job.get("id")) or ""
    if not re.fullmatch(re.escape(folder.name) + r"(\.\d{1,6})?", job_id):
        job_id = folder.name
    return Submission(folder, Cluster(address, token), job_id)


def _is_surely_not_there(cluster: Cluster, job_id: str) -> bool:
    try:
        return cluster.job(job_id) is None
    except HeliostatError:
        return False


def _seen(folder: RunFolder) -> RunFolder:
    """Returns what there is of a run: a fresh copy where it lives in an object store."""
    if not folder.url or Mirror(folder, "read").is_new():
        return folder
    return open_run(folder.home, folder.name)


def _same(order: Order, found: Submission, shipment: Shipment) -> Submission:
    record = read_object(found.folder.record)
    asked = order.recipe.fingerprint()
    if record.get("fingerprint") != asked or record.get("workload") != order.spec:
        raise UsageError(
            f"the name {order.folder.name!r} is taken by another run of {record.get('workload')} "
            f"with recipe {record.get('fingerprint')}, this one is {asked}; choose another --name"
        )
    job, name, address = found.job(), order.folder.name, found.cluster.address
    if job is None and not found.folder.result.exists():
        raise UsageError(
            f"run {name!r} was submitted before to {address}, which does not know it; go on with: "
            f"heliostat resume {name} --runs {shipment.place}"
        )
    state = job.state if job else "finished"
    shipment.say(f"run {name!r} was submitted before to {address}: {state}")
    return found


def _cluster(order: Order) -> tuple[Cluster, Head | None]:
    """Returns a cluster that answers and is large enough, starting a private one if need be."""
    layout = order.recipe.layout
    hosts = pool_hosts(order.workload, layout)
    address = order.address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if address:
        cluster = Cluster(address.rstrip("/"))
        cluster.check()
        check_layout(layout, hosts, cluster.nodes())
        remember_cluster(cluster.address)
        return cluster, None
    check_layout(layout, hosts, [_own_machine()])
    head = start_head()
    return Cluster(head.address, head.token), head


def _own_machine() -> dict[str, float]:
    import torch

    return {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}


def _send(
    order: Order, shipment: Shipment, package: Path, cluster: Cluster, head: Head | None
) -> Submission:
    folder = order.folder
    record = read_object(folder.record)
    count = 1 + sum(event["event"] == "submitted" for event in folder.events.read())
    job_id = folder.name if count == 1 else f"{folder.name}.{count}"
    place = {"address": cluster.address, "id": job_id, "head": str(head.folder) if head else None}
    replace_text(folder.job, json.dumps(place))
    folder.events.add("submitted", address=cluster.address)
    if folder.url:  # from here on the job may write them
        Mirror(folder, "launch").hand_over(folder.job.name, folder.events.path.name)
    python = sys.executable if head else "python"
    command = [python, "-m", "cluster.supervisor", folder.name, "--runs", shipment.place]
    variables = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = _STOP_WAIT_S
    if head is not None:
        variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # nobody preempts this machine
    metadata = {
        "run": folder.name,
        "workload": order.spec,
        "recipe": record["fingerprint"],
        "code": record["code"],
        "wandb_run_id": record["id"],
    }
    cluster.submit(job_id, shlex.join(command), package, variables, metadata)
    return Submission(folder, cluster, job_id)
