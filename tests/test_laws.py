"""The laws of the repository: who imports whom, what stays light, and how long things may be."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "heliostat": ROOT / "platform" / "heliostat",
    "algorithms": ROOT / "algorithms",
    "envs": ROOT / "envs",
    "cluster": ROOT / "cluster",
}
MAY_IMPORT = {
    "heliostat": set(),
    "envs": set(),
    "algorithms": {"heliostat", "envs"},
    "cluster": {"heliostat", "envs", "algorithms"},
}
"""Of our own packages, beside itself."""
RAY_SIDE = ("heliostat.gauges", "heliostat.ray_pool", "heliostat.ray_session")
RAY_SIDE += ("heliostat.ray_train", "heliostat.rllib")
RAY_SIDE += ("heliostat.actors.", "envs.collect", "cluster.")
HEAVY = ("torch", "ray", "transformers", "wandb", "matplotlib", "gymnasium", "pandas")
LIGHT = ("heliostat", "heliostat.recipe", "heliostat.workload", "heliostat.folder")
"""With every method's ``workload`` and the catalogue: what ``heliostat list`` and ``runs`` load."""

FUNCTION_LINES, MODULE_LINES, CORE_LINES = 60, 400, 4000
TRAIN_LINES = 100
"""Of a ``train.py``, whose ``train`` reads like its paper, in one piece."""
LONGER: Mapping[str, str] = {}
"""Module or ``module:function`` that may be longer -> why."""


@dataclass(frozen=True)
class Import:
    """One module that another imports."""

    name: str
    typing_only: bool
    on_load: bool
    """At the module's top, not inside a function."""


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(_imports(tree_of(module), typing_only=False, on_load=True))


def _imports(node: ast.AST, typing_only: bool, on_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, typing_only, on_load) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                assert level == 0, "imports are absolute"
                for alias in names:
                    inner = f"{source}.{alias.name}"
                    yield Import(inner if inner in MODULES else str(source), typing_only, on_load)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(child, True, on_load)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, typing_only, False)
            case _:
                yield from _imports(child, typing_only, on_load)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def is_light(module: str) -> bool:
    return module in LIGHT or module == "algorithms.catalog" or module.endswith(".workload")


def test_the_packages_are_where_they_should_be():
    assert {"heliostat.run", "algorithms.catalog", "cluster.cli"} <= MODULES.keys()
    assert Import("torch", typing_only=False, on_load=True) in imports_of("heliostat.learner")
    assert Import("torch", typing_only=True, on_load=True) in imports_of("heliostat.seeding")
    assert Import("torch", typing_only=False, on_load=False) in imports_of("heliostat.seeding")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    package = package_of(module)
    ours = {package_of(found.name) for found in imports_of(module)} & PACKAGES.keys()
    assert ours - {package} <= MAY_IMPORT[package]


def test_methods_do_not_know_one_another():
    for module in MODULES:
        for found in imports_of(module):
            mine, theirs = (name.split(".")[1:2] for name in (module, found.name))
            if package_of(module) == package_of(found.name) == "algorithms" and mine and theirs:
                assert theirs in (mine, ["common"]), f"{module} imports {found.name}"


def test_ray_is_imported_on_the_ray_side_alone():
    importers = {
        module
        for module in MODULES
        if any(package_of(found.name) == "ray" for found in imports_of(module))
    }
    assert {module for module in importers if not module.startswith(RAY_SIDE)} == set()
    assert {"heliostat.ray_pool", "heliostat.ray_session", "heliostat.ray_train"} <= importers


@pytest.mark.parametrize("module", [module for module in MODULES if is_light(module)])
def test_what_a_listing_loads_imports_nothing_heavy(module):
    loaded = {package_of(found.name) for found in imports_of(module) if not found.typing_only}
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("command", [["list"], ["runs", "--runs", "nowhere"]])
def test_a_listing_answers_without_loading_anything_heavy(command, tmp_path):
    code = (
        "import sys; from cluster.cli import main; assert main(sys.argv[1:]) == 0;"
        f"print(*sorted(set({HEAVY!r}) & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout
    assert done.stderr.split() == []


def test_heliostat_imports_itself_without_cycles():
    graph = {
        module: {
            found.name
            for found in imports_of(module)
            if found.name in MODULES and not found.typing_only
        }
        for module in MODULES
        if package_of(module) == "heliostat"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' <- '.join(error.args[1])}")


# ---------------------------------------------------------------------------- names


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name[0] not in "._"}


def test_the_folder_platform_never_becomes_a_package():
    assert visible(ROOT / "platform") == {"heliostat"}
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert not (ROOT / "tests" / "platform").exists()


def test_nothing_of_ours_has_the_name_of_a_standard_module():
    importable = {*PACKAGES, *(Path(name).stem for name in visible(ROOT / "tests"))}
    at_top = {module.partition(".")[2] for module in MODULES}
    assert (importable | at_top) & sys.stdlib_module_names == set()


# ---------------------------------------------------------------------------- sizes, documents

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yields functions and classes with dotted names, those inside functions left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("module", MODULES)
def test_whatever_is_public_is_documented(module):
    assert ast.get_docstring(tree_of(module)), f"{module} says nothing about itself"
    silent = [
        name
        for name, node in definitions(tree_of(module))
        if not any(part.startswith("_") for part in name.split(".")) and not ast.get_docstring(node)
    ]
    assert silent == []


def test_functions_and_modules_are_short():
    long: dict[str, int] = {}
    for module, path in MODULES.items():
        if (lines := len(path.read_text().splitlines())) > MODULE_LINES:
            long[module] = lines
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                whole = path.name == "train.py" and node.name == "train"
                if lines > (TRAIN_LINES if whole else FUNCTION_LINES):
                    long[f"{module}:{node.name}"] = lines
    assert {name: lines for name, lines in long.items() if name not in LONGER} == {}
    assert LONGER.keys() <= long.keys(), "an exception is no longer needed"


def test_a_methods_loop_fits_on_two_screens():
    lengths = {
        module: len(path.read_text().splitlines())
        for module, path in MODULES.items()
        if package_of(module) == "algorithms" and path.name == "train.py"
    }
    assert {name: lines for name, lines in lengths.items() if lines > TRAIN_LINES} == {}


def code_lines(path: Path) -> int:
    """Counts lines that hold code: no blank ones, no comments, no docstrings."""
    text = path.read_text()
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    nothing.add(tokenize.ENDMARKER)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in nothing
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                lines -= set(range(first, (last or first) + 1))
    return len(lines)


def test_the_core_stays_small(record_property):
    core = [
        path
        for module, path in MODULES.items()
        if package_of(module) == "heliostat" and not module.startswith("heliostat.testing")
    ]
    lines = sum(map(code_lines, core))
    record_property("core_code_lines", lines)
    assert lines <= CORE_LINES
