"""The README: its figures come from a command, and its commands are understood."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from algorithms.catalog import CATALOG
from cluster.cli import parse
from cluster.demo import Interval, format_table
from heliostat.workload import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(heliostat .*?)(?:\s+#.*)?$", README, re.MULTILINE)


def test_the_table_is_what_the_demonstration_wrote() -> None:
    table = json.loads((ROOT / "docs" / "demo.json").read_text())
    assert format_table(table) in README
    assert (ROOT / "docs" / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str) -> None:
    options = parse(shlex.split(line)[1:])
    workload = getattr(options, "workload", None)
    if workload and "my_package" not in workload:
        found, recipe = load(workload, CATALOG)
        changes = [text for text in options.overrides if not text.startswith("@")]
        found.recipe(recipe).override(*changes)


def test_make_knows_the_verbs_that_are_named() -> None:
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    verbs = set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= verbs <= targets


def test_every_file_of_the_map_exists() -> None:
    block = README[README.index("platform/heliostat/   the core") :].split("```")[0]
    folder = ""
    for line in block.splitlines():
        names = re.match(r"(\s*)(\S+(?:  \S+\.py)*)", line)
        if not names:
            continue
        for name in names[2].split():
            folder = folder if names[1] else name
            assert (ROOT / (folder + name if names[1] else name)).exists(), name


def test_an_interval_is_students() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
