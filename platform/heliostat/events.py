"""The run's diary: starts, deaths, restarts and stops, one JSON object a line."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heliostat.privacy import scrub


@dataclass(frozen=True, slots=True)
class EventLog:
    """Appends to ``events.jsonl``. Any process of a run may: a line is one atomic append."""

    path: Path

    def add(self, event: str, **details: str | float | None) -> None:
        """Writes one event with the time in Unix seconds, its texts free of credentials."""
        shown = {key: scrub(v) if isinstance(v, str) else v for key, v in details.items()}
        line = json.dumps({"time": time.time(), "event": event, **shown}) + "\n"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = "\n" + line  # a line torn by a kill must not swallow this one
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def files(self) -> list[Path]:
        """Returns the diary and those of ranks on other machines, which are named after it."""
        return sorted(self.path.parent.glob(f"{self.path.stem}*{self.path.suffix}"))

    def read(self) -> list[dict[str, Any]]:
        """Returns the events in the order of time; a line torn by a kill is left out."""
        events: list[dict[str, Any]] = []
        for path in self.files():
            for line in path.read_text().splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return sorted(events, key=lambda event: event["time"])
