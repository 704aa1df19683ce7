"""What a run was made of: code, versions and hardware, written beside its recipe."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import time
import uuid
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from heliostat.recipe import Recipe
from heliostat.workload import OWN_PACKAGES, Workload

_LIBRARIES = ("heliostat", "ray", "torch", "transformers", "numpy", "gymnasium", "mujoco", "wandb")


def describe_environment(workload: Workload, spec: str, recipe: Recipe) -> dict[str, Any]:
    """Returns a JSON-ready record; it holds no path, host name, user name or variable."""
    return {
        "id": uuid.uuid4().hex[:12],
        "workload": spec,
        "method": describe_method(workload, recipe),
        "fingerprint": recipe.fingerprint(),
        "created": time.time(),
        "code": code_hash(workload, spec),
        "python": platform.python_version(),
        "versions": {name: found for name in _LIBRARIES if (found := _version(name))},
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def describe_method(workload: Workload, recipe: Recipe) -> dict[str, Any]:
    """Returns what a reader of the run folder needs, so that none has to import the workload."""
    return {
        "name": workload.name,
        "summary": workload.summary,
        "paper": workload.paper,
        "score": workload.score,
        "total_steps": recipe.total_steps,
        "plots": [asdict(plot) for plot in workload.plots],
    }


def packages_of(workload: Workload, spec: str) -> list[str]:
    """Returns the top-level packages that a run imports: ours, and those its paths name."""
    paths = [workload.train, *workload.roles.values(), *([spec] if ":" in spec else [])]
    return sorted({*OWN_PACKAGES, *(path.partition(":")[0].partition(".")[0] for path in paths)})


def code_hash(workload: Workload, spec: str) -> str:
    """Returns 16 hex digits over every Python source of the run's packages."""
    total = hashlib.sha256()
    for package in packages_of(workload, spec):
        root = source_of(package)
        if root is None:
            continue
        for source in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            total.update(str(source.relative_to(root.parent)).encode())
            total.update(source.read_bytes())
    return total.hexdigest()[:16]


def source_of(package: str) -> Path | None:
    """Returns the folder of a top-level package, or the file of a module; None where neither is."""
    found = importlib.util.find_spec(package)
    if found is None:
        return None
    if found.submodule_search_locations:
        return Path(found.submodule_search_locations[0])
    return Path(found.origin) if found.origin else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
