"""A run's folder: what a run leaves behind and where, known to whoever writes or reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heliostat.events import EventLog

ALIVE_S = 60.0
"""A machine that has left no sign of life in a run's URL for so long does not run it."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What a run leaves behind, and where."""

    path: Path
    url: str = ""
    """Where an object store keeps the run; then ``path`` is this machine's copy."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def recipe(self) -> Path:
        """The resolved recipe, YAML."""
        return self.path / "recipe.yaml"

    @property
    def record(self) -> Path:
        """What was launched, when and on what: workload, method, versions, hardware, code hash."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One row of metrics a step, JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """The final metrics, written when the run has finished."""
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def stop(self) -> Path:
        """Exists while the run is asked to save and leave; "pruned": it is not to go on."""
        return self.path / "stop"

    @property
    def pruned(self) -> bool:
        """Whether a search has given the run up for better ones."""
        return self.stop.exists() and self.stop.read_text() == "pruned"

    @property
    def attempt(self) -> Path:
        """Number of the attempt that may write; an older one that still lives must not."""
        return self.path / "attempt"

    @property
    def lock(self) -> Path:
        """Locked by the process that runs the run; the system lets go when that process dies."""
        return self.path / ".lock"

    @property
    def alive(self) -> Path:
        """Sign of life of the launching process, for those who see the run's URL only."""
        return self.path / "alive.json"

    @property
    def log(self) -> Path:
        """What a submitted run wrote to its standard output and error."""
        return self.path / "log.txt"

    @property
    def job(self) -> Path:
        """Where a submitted run was sent: cluster, submission, and the local head if it has one."""
        return self.path / "job.json"

    @property
    def home(self) -> str:
        """The place of run folders that this one is in, as ``--runs`` takes it."""
        return self.url.rpartition("/")[0] or str(self.path.parent)

    @property
    def events(self) -> EventLog:
        """The run's diary."""
        return EventLog(self.path / "events.jsonl")


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old text or the new, never a part."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(text)
    partial.replace(path)
