"""Writes the model of a run's checkpoint in a form that other programs read."""

from __future__ import annotations

from pathlib import Path

from cluster.places import open_run
from cluster.running import started
from heliostat import checkpoint
from heliostat.errors import UsageError
from heliostat.workload import resolve


def export(place: str, name: str, step: int | None, folder: Path) -> int:
    """Exports a run's model, as its workload does that.

    Args:
        place: what ``--runs`` says.
        name: of the run.
        step: of which checkpoint; None takes the newest whole one.
        folder: a new or an empty one.

    Returns:
        The checkpoint's step.

    Raises:
        UsageError: there is no such checkpoint, the workload exports nothing, or the folder holds
            something.
        CheckpointCorrupt: the checkpoint that was asked for is not whole.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to: expected a new or an empty folder, found {str(folder)!r}")
    run = open_run(place, name, heavy=True)
    workload, spec, recipe = started(run)
    if workload.export is None:
        raise UsageError(f"expected a workload that exports its model, found {spec!r}")
    if step is None:
        found = checkpoint.latest(run.checkpoints)
    else:
        path = checkpoint.path_of(run.checkpoints, step)
        found = checkpoint.load(path) if path.exists() else None
    if found is None:
        wanted = "a whole checkpoint" if step is None else f"a checkpoint of step {step}"
        steps = checkpoint.steps(run.checkpoints)
        raise UsageError(f"expected {wanted} of run {name!r}, found steps {steps}")
    resolve(workload.export)(recipe, found[1], folder)
    return found[0]
