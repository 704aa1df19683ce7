"""The doctor: looks at this machine, starts nothing, and says what is missing before a run does."""

from __future__ import annotations

import netrc
import os
import platform
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

import numpy as np
import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from heliostat.errors import UsageError
from heliostat.layout import Demand, Layout, demands
from heliostat.recipe import Recipe, Tracking
from heliostat.wandb_view import wandb_mode
from heliostat.workload import Workload, pool_hosts, resolve

Level = Literal["ok", "warning", "missing"]

_GIB = 2**30
_PROCESS_GIB = 0.7
"""Memory of one learner or host that has imported torch, before any model."""
_OBJECT_STORE_SHARE = 0.3
"""Of the memory, in shared memory: what Ray takes for its object store."""
_FREE_DISK_GIB = 2.0
_FULL_DISK_SHARE = 0.95
"""A disk fuller than this keeps Ray from placing objects on it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    """``missing``: a run would fail. ``warning``: it may, or something optional is not there."""
    subject: str
    text: str
    """What was found, and what was expected where it differs."""
    remedy: str = ""
    """What to do; empty where nothing is."""


def examine(
    workload: Workload | None, recipe: Recipe | None, runs: Path = Path("runs")
) -> list[Finding]:
    """Looks at versions, hardware, settings and one environment of each family, within seconds.

    Ray is not started: whether a local one can be is found out by the first run.

    Args:
        workload: narrows the layout to the roles that it has; None assumes all families.
        recipe: what the machine must hold; None looks at the machine alone.
        runs: where runs will be written.
    """
    layout = recipe.layout if recipe else Layout.in_process()
    gpus, gpu = _gpus()
    tracking = recipe.tracker if recipe else Tracking()
    findings = [*_versions(), _cpus(), gpu, *_memory(layout), *_disk(runs)]
    findings += [_wandb(tracking), _token()]
    if recipe is not None:
        findings += [*_layout(layout, workload, gpus), *_compilers(layout), _files(recipe)]
    return findings + [_family(name, step) for name, step in _FAMILIES.items()]


def format_findings(findings: Sequence[Finding]) -> str:
    """Returns the findings as aligned text, remedies below, and a line of counts."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    counts = {
        level: sum(finding.level == level for finding in findings)
        for level in ("missing", "warning", "ok")
    }
    return "\n".join([*lines, ", ".join(f"{count} {level}" for level, count in counts.items())])


# ---------------------------------------------------------------------------- software


def _versions() -> Iterator[Finding]:
    try:
        ours = metadata.metadata("heliostat")
    except metadata.PackageNotFoundError:
        yield Finding("missing", "heliostat", "is not installed", "pip install -e . in its folder")
        return
    wanted, found = SpecifierSet(ours["Requires-Python"]), platform.python_version()
    if found in wanted:
        yield Finding("ok", "python", found)
    else:
        yield Finding("missing", "python", f"expected {wanted}, found {found}", "change Python")
    yield from (_library(requirement) for requirement in _requirements())


def _requirements(extra: str = "") -> Iterator[Requirement]:
    """Yields what heliostat itself needs, or what one of its extras adds to that."""
    for text in metadata.requires("heliostat") or []:
        requirement = Requirement(text)
        base, wanted = (
            requirement.marker is None or requirement.marker.evaluate({"extra": name})
            for name in ("", extra)
        )
        if wanted and not (extra and base):
            yield requirement


def _library(requirement: Requirement) -> Finding:
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        found = "none"
    if found != "none" and requirement.specifier.contains(found, prereleases=True):
        return Finding("ok", requirement.name, found)
    return Finding(
        "missing",
        requirement.name,
        f"expected {requirement.specifier or 'any version'}, found {found}",
        f"pip install '{requirement.name}{requirement.specifier}'",
    )


def _compilers(layout: Layout) -> Iterator[Finding]:
    if layout.parallelism != "deepspeed":
        return
    for tool, remedy in (
        ("ninja", "pip install ninja"),
        ("g++", "install the system's C++ compiler, such as apt-get install g++"),
    ):
        path = shutil.which(tool)
        if path is None:
            text = "DeepSpeed compiles its operators at first use and needs it; found none"
            yield Finding("missing", tool, text, remedy)
        else:
            yield Finding("ok", tool, "found, for DeepSpeed's operators")
    yield from (_library(found) for found in _requirements("deepspeed") if found.name != "ninja")
    yield from _stale_locks()


def _stale_locks() -> Iterator[Finding]:
    """A worker killed during a build leaves a lock on which every later one waits for ever."""
    default = Path.home() / ".cache" / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    for lock in sorted(root.glob("**/lock")):
        yield Finding(
            "warning",
            "deepspeed build",
            f"found the lock {lock}: a build is running, or was killed and will hang the next one",
            "where nothing is being built, remove that file",
        )


# ---------------------------------------------------------------------------- hardware


def _layout(layout: Layout, workload: Workload | None, gpus: int) -> Iterator[Finding]:
    if os.environ.get("RAY_ADDRESS"):
        text = "RAY_ADDRESS is set: that cluster is compared with the layout when a run starts"
        yield Finding("ok", "layout", text)
        return
    try:
        pools = pool_hosts(workload, layout) if workload else dict(layout.families())
    except (ImportError, UsageError) as error:
        text = f"the workload's roles cannot be imported: {error}"
        yield Finding("missing", "roles", text, "install what is named there")
        return
    wanted = demands(layout, pools)
    yield _capacity("CPUs", [(demand, demand.cpus) for demand in wanted], os.cpu_count() or 1)
    yield _capacity("GPUs", [(demand, demand.gpus) for demand in wanted], gpus)


def _capacity(kind: str, wanted: Sequence[tuple[Demand, float]], have: int) -> Finding:
    """Compares what is wanted, as (demand, amount for each of its processes), with what is here."""
    total = sum(demand.count * amount for demand, amount in wanted)
    largest = max((amount for _, amount in wanted), default=0.0)
    text = f"{total:g} wanted in all, {largest:g} at most by one actor; {have} here"
    if total <= have:
        return Finding("ok", f"layout {kind}", text)
    wants = ", ".join(f"{demand.count} {demand.what} of {amount:g}" for demand, amount in wanted)
    remedy = "lower layout.*, take layout=in_process, or give a cluster with --address"
    return Finding("missing", f"layout {kind}", f"{text} ({wants})", remedy)


def _cpus() -> Finding:
    count = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    if ours == count:
        return Finding("ok", "CPUs", f"{count}")
    text = f"{count}, of which this process may use {ours}; Ray would count on all"
    return Finding("warning", "CPUs", text, f"ask for no more than {ours} in layout.*")


def _gpus() -> tuple[int, Finding]:
    """Returns how many there are for torch, and the finding."""
    try:
        import torch
    except (ImportError, OSError) as error:
        text = f"torch cannot be imported: {error}"
        return 0, Finding("missing", "GPU", text, "install torch again")
    count = torch.cuda.device_count()
    if not count:
        return 0, Finding("ok", "GPU", "none that torch can use; learners and hosts run on CPUs")
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    return count, Finding("ok", "GPU", f"{count} of {', '.join(names)}")


def _memory(layout: Layout) -> Iterator[Finding]:
    total, free = _memory_gib()
    processes = max(1, layout.learners) + sum(hosts.hosts for _, hosts in layout.families())
    wanted = _PROCESS_GIB * processes
    text = f"{free:.1f} GiB free of {total:.1f}; {processes} bare process(es) want {wanted:.1f}"
    if free >= wanted:
        yield Finding("ok", "memory", text)
    else:
        yield Finding("warning", "memory", text, "lower the layout's learners and hosts")
    shared = Path("/dev/shm")  # the one place where Ray looks for it
    if not layout.uses_ray or not shared.is_dir():
        return
    store, room = _OBJECT_STORE_SHARE * total, psutil.disk_usage(str(shared)).free / _GIB
    text = f"{room:.1f} GiB free in {shared}; Ray's object store wants {store:.1f}"
    if room >= store:
        yield Finding("ok", "shared memory", text)
    else:
        remedy = f"give the container --shm-size={store:.0f}g, or Ray falls back on the slower disk"
        yield Finding("warning", "shared memory", text, remedy)


def _memory_gib() -> tuple[float, float]:
    """Returns (total, free) of the machine, or of the container where that has less."""
    memory = psutil.virtual_memory()
    try:
        bound = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or the word max
        bound = memory.total
    return min(memory.total, bound) / _GIB, min(memory.available, bound) / _GIB


def _disk(runs: Path) -> Iterator[Finding]:
    runs = runs.absolute()
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield Finding("ok", "runs folder", f"{runs} can be written")
    except OSError as error:
        text = f"{runs} cannot be written: {error.strerror}"
        yield Finding("missing", "runs folder", text, "choose another with --runs")
    usage = psutil.disk_usage(str(folder))
    text = f"{usage.free / _GIB:.1f} GiB free, {usage.percent:.0f} % used"
    if usage.free / _GIB >= _FREE_DISK_GIB and usage.percent <= 100 * _FULL_DISK_SHARE:
        yield Finding("ok", "disk", text)
    else:
        yield Finding("warning", "disk", text, "free some, or choose another disk with --runs")


# ---------------------------------------------------------------------------- settings


def _files(recipe: Recipe) -> Finding:
    try:
        recipe.check()
    except UsageError as error:
        return Finding("missing", "recipe", str(error))
    return Finding("ok", "recipe", f"{recipe.fingerprint()}, and what it needs is there")


def _wandb(tracking: Tracking) -> Finding:
    try:
        mode = wandb_mode(tracking)
    except UsageError as error:
        return Finding("missing", "W&B", str(error))
    if mode != "online":
        return Finding("ok", "W&B", f"{mode}; WANDB_MODE=online uploads while a run goes on")
    if os.environ.get("WANDB_API_KEY") or _netrc_has_key():
        return Finding("ok", "W&B", "online, with a key")
    return Finding(
        "warning", "W&B", "online without a key: runs will be logged offline", "wandb login"
    )


def _netrc_has_key() -> bool:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(path).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _token() -> Finding:
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        text = "RAY_AUTH_MODE turns it off: whoever reaches Ray's ports can run code"
        return Finding("warning", "Ray token", text, "unset RAY_AUTH_MODE")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Finding("ok", "Ray token", "RAY_AUTH_TOKEN is set")
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not given and not os.environ.get("RAY_ADDRESS"):
        return Finding("ok", "Ray token", "a local Ray gets a fresh one for each run")
    return _token_file(Path(given) if given else Path.home() / ".ray" / "auth_token")


def _token_file(path: Path) -> Finding:
    if not path.is_file():
        text = f"expected one in {path} or in RAY_AUTH_TOKEN, found none; a cluster will refuse us"
        return Finding("warning", "Ray token", text, "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"others on this machine may read {path}"
        return Finding("warning", "Ray token", text, f"chmod 600 {path}")
    return Finding("ok", "Ray token", f"in {path}")


# ---------------------------------------------------------------------------- environments


def _countdown() -> str:
    from envs import countdown

    rng = np.random.default_rng(0)
    problems = countdown.draw(rng, "train", 4)
    tokens, _ = countdown.traces(rng, problems)
    solved = countdown.grade(problems, tokens[:, countdown.THREE.prompt_tokens :]).solved
    if not solved.all():
        raise RuntimeError(f"expected its own traces to be graded right, found {solved.tolist()}")
    return "4 problems drawn, traced and graded"


def _classic_control() -> str:
    return _gymnasium("CartPole-v1")


def _mujoco() -> str:
    return _gymnasium("InvertedPendulum-v5") + f" on mujoco {metadata.version('mujoco')}"


def _gymnasium(name: str) -> str:
    import gymnasium

    environment = cast("gymnasium.Env[Any, Any]", gymnasium.make(name))
    try:
        environment.reset(seed=0)
        environment.action_space.seed(0)
        environment.step(environment.action_space.sample())
    finally:
        environment.close()
    return f"{name} takes a step"


def _pettingzoo() -> str:
    """Steps PettingZoo's own example, which needs no drawing library."""
    example = resolve("pettingzoo.test.example_envs.generated_agents_parallel_v0:parallel_env")
    environment = example()
    try:
        environment.reset(seed=0)
        agents = list(environment.agents)
        environment.step({agent: environment.action_space(agent).sample() for agent in agents})
    finally:
        environment.close()
    return f"its parallel example takes a step with {len(agents)} agents"


_FAMILIES: Mapping[str, Callable[[], str]] = {
    "countdown": _countdown,
    "gymnasium": _classic_control,
    "gymnasium MuJoCo": _mujoco,
    "PettingZoo": _pettingzoo,
}
"""Family -> constructs and steps one environment of it, and says so."""


def _family(name: str, step: Callable[[], str]) -> Finding:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's advice to its own developers
            return Finding("ok", name, step())
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what was found
        text = f"family unavailable: {type(error).__name__}: {error}"
        return Finding("warning", name, text, "pip install -e '.[envs]' in heliostat's folder")
