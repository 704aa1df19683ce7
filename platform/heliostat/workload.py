"""Workloads: the record that a method publishes, and how a name on the command line finds one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heliostat.errors import UsageError, nearest
from heliostat.layout import Hosts, Layout
from heliostat.recipe import Recipe

OWN_PACKAGES = ("heliostat", "algorithms", "envs", "cluster")
"""Top-level packages of this project, which a user's folder must not shadow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One picture of the report: metrics over steps, with a level to compare them against."""

    title: str
    metrics: tuple[str, ...]
    level: str | None = None
    """A final metric drawn as a horizontal line, such as the score before RL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a method publishes about itself: names and import paths, no behaviour.

    Import paths are ``package.module:name``, so that reading a workload loads no heavy library.
    """

    name: str
    summary: str
    """One line for ``heliostat list``."""
    paper: str
    """Title, authors' short form, year and identifier."""
    recipes: Mapping[str, Recipe]
    """Named recipes; the first is the default."""
    train: str
    """Import path of ``train(run) -> final metrics``."""
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Pool name -> import path of its role class."""
    brings_actors: bool = False
    """``train`` runs in the launching process and makes its own Ray actors, as many learners and
    environment hosts as the layout says: launching connects to Ray and checks that they fit."""
    spaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Search space name -> recipe key -> distribution, such as ``loguniform(1e-5, 1e-3)``."""
    export: str | None = None
    """Import path of ``export(recipe, state of a checkpoint, folder)``, which writes the trained
    model in a form that others read."""
    score: str | None = None
    """Metric that ranks checkpoints, larger is better."""
    plots: tuple[Plot, ...] = ()

    def recipe(self, name: str | None = None) -> Recipe:
        """Returns the named recipe, or the default.

        Raises:
            UsageError: no recipe has that name; the message gives the nearest.
        """
        if name is None:
            return next(iter(self.recipes.values()))
        if name not in self.recipes:
            raise UsageError(nearest(name, list(self.recipes), f"recipe of workload {self.name!r}"))
        return self.recipes[name]


def pool_hosts(workload: Workload, layout: Layout) -> dict[str, Hosts]:
    """Returns pool name -> its host actors, by the family of its role; imports the roles.

    What a workload starts by itself counts as one pool, ``environment``.

    Raises:
        UsageError: an import path leads nowhere, or a role's family is unknown.
    """
    if workload.brings_actors:
        return {"environment": layout.environment}
    return {name: layout.hosts_of(resolve(path).family) for name, path in workload.roles.items()}


def load(spec: str, catalog: Mapping[str, str]) -> tuple[Workload, str | None]:
    """Finds ``NAME[:RECIPE]`` in the catalogue or ``package.module:ATTRIBUTE[:RECIPE]``.

    Args:
        spec: what the user typed.
        catalog: workload name -> import path.

    Returns:
        The workload and the recipe's name, None where the user named none.

    Raises:
        UsageError: nothing has that name, the module cannot be imported, the attribute is no
            ``Workload``, or the working folder shadows one of our packages.
    """
    head, _, rest = spec.partition(":")
    if head in catalog:
        return _workload(catalog[head]), rest or None
    if "." not in head or not rest:
        raise UsageError(nearest(head, list(catalog), "workload") + "; or give package.module:NAME")
    attribute, _, recipe = rest.partition(":")
    refuse_shadowing(Path.cwd())
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return _workload(f"{head}:{attribute}"), recipe or None


def refuse_shadowing(folder: Path) -> None:
    """Refuses a working folder whose own ``envs`` or the like would be imported in place of ours.

    Raises:
        UsageError: names both paths.
    """
    home = Path(__file__).parents[1]  # of an installation; a checkout holds the others one above
    for package in OWN_PACKAGES:
        theirs = folder / package
        ours = home / package if (home / package).exists() else home.parent / package
        if (theirs / "__init__.py").exists() and not (ours.exists() and theirs.samefile(ours)):
            raise UsageError(
                f"the folder {theirs} has the name of heliostat's own package {ours}; "
                "rename it or start from another folder"
            )


def resolve(path: str) -> Any:  # noqa: ANN401 - any object may stand behind an import path
    """Imports ``package.module:name``.

    Raises:
        UsageError: the path is malformed, or names no module or attribute.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise UsageError(f"expected package.module:name, found {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UsageError(
                f"no module {error.name!r} for {path!r}; start from the folder that holds it"
            ) from error
        raise
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(nearest(attribute, public, f"name in {module_name}"))
    return getattr(module, attribute)


def _workload(path: str) -> Workload:
    found = resolve(path)
    if not isinstance(found, Workload):
        raise UsageError(
            f"expected a heliostat Workload at {path!r}, found {type(found).__name__}; "
            "publish one with Workload(name=..., ...)"
        )
    return found
