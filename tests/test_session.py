"""The session recorded in the docs is run again, as a user would, in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heliostat.tracker import read_metrics

PAGE = Path(__file__).parents[1] / "docs" / "submitting.md"
HELIOSTAT = str(Path(sys.executable).with_name("heliostat"))


def recorded() -> list[tuple[str, list[str]]]:
    """The page's commands, each with the lines that it was seen to print."""
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
    return steps


def pattern(line: str) -> str:
    """Matches a line with other numbers and gaps, and anything in place of an ellipsis."""
    parts = (re.sub(r"(\\ )+", r"\\s+", re.escape(part)) for part in line.split("…"))
    return "^" + ".*".join(re.sub(r"\d+", r"\\d+", part) for part in parts) + "$"


@pytest.mark.ray
@pytest.mark.long
def test_the_recorded_session_goes_as_it_says(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    for command, lines in recorded():
        if command.startswith("heliostat stop"):
            until = time.monotonic() + 120
            while not read_metrics(tmp_path / "runs" / "first") and time.monotonic() < until:
                time.sleep(0.1)
        done = subprocess.run(
            [HELIOSTAT, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, (command, printed[-3000:])
        for line in lines:
            assert re.search(pattern(line), printed, re.MULTILINE), (line, printed[-3000:])
