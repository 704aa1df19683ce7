"""The command: exit codes, what goes to which stream, and what signals leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.catalog import CATALOG
from cluster import cli
from heliostat.folder import RunFolder
from heliostat.tracker import read_metrics

TESTS = Path(__file__).parent
TOY = "toy_package.workload:WORKLOAD"
STEPS = 40
HELIOSTAT = [str(Path(sys.executable).with_name("heliostat"))]
"""As a user starts it: the working folder is not on the import path of the interpreter."""


class Terminal:
    """Runs commands in this process, in a folder of their own."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.runs = folder / "runs"
        self._capture = capture
        self.out = self.err = ""

    def run(self, *arguments: str) -> int:
        self._capture.readouterr()
        code = cli.main(arguments)
        self.out, self.err = self._capture.readouterr()
        return code

    def answer(self) -> dict[str, Any]:
        """The JSON object in the last line of the output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


def test_the_list_names_every_workload_with_its_recipes(terminal):
    assert terminal.run("list") == 0
    assert all(name in terminal.out for name in CATALOG)
    assert "recipes: laptop" in terminal.out
    assert terminal.err == ""


def test_a_run_is_named_after_workload_and_recipe_and_says_how_to_go_on(terminal):
    assert terminal.run("run", TOY, "steps=2") == 0
    (folder,) = terminal.runs.iterdir()
    assert folder.name.startswith("toy-default-")
    assert "score" in terminal.out
    assert f"heliostat report {folder.name} --runs {terminal.runs}" in terminal.out


def test_tensorboard_is_short_for_a_key_of_the_recipe(terminal):
    assert terminal.run("run", TOY, "--name", "a", "steps=2", "--tensorboard") == 0
    assert "tensorboard: true" in (terminal.runs / "a" / "recipe.yaml").read_text()
    assert list((terminal.runs / "a" / "tensorboard").iterdir())


def test_json_ends_the_output_with_one_object(terminal):
    assert terminal.run("run", TOY, "--name", "a", "--json", "steps=2", "--runs", "elsewhere") == 0
    assert len(terminal.out.splitlines()) == 1
    answer = terminal.answer()
    assert answer.keys() == {"run", "folder", "metrics"}
    assert (answer["run"], Path(answer["folder"])) == ("a", Path("elsewhere/a").resolve())
    assert answer["metrics"].keys() == {"score", "weight"}
    assert not terminal.runs.exists()


def test_changes_to_the_recipe_may_stand_on_both_sides_of_a_flag(terminal):
    assert terminal.run("run", f"{TOY}:default", "steps=2", "--name", "a", "seed=7", "lr=0.5") == 0
    text = (terminal.runs / "a" / "recipe.yaml").read_text()
    assert {"steps: 2", "seed: 7", "lr: 0.5"} <= set(text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "t1x"], "unknown workload 't1x'; did you mean 't1'?"),
        (["run", "t1:laptob"], "'laptob'; did you mean 'laptop'?"),
        (["run", "t1", "tempereture=2"], "'tempereture'; did you mean 'temperature'?"),
        (["run", "t1", "stepz=2"], "did you mean 'steps'?"),
        (
            ["run", "t1", "steps=-1"],
            "steps: input should be greater than or equal to 0, found '-1'",
        ),
        (["run", "t1", "steps"], "expected key=value, found 'steps'"),
        (["run", "t1", "layout=lapptop"], "did you mean 'laptop'?"),
        (["run", "t1", "questions=none.jsonl"], "found none at 'none.jsonl'"),
        (["run", TOY, "--name", "../a"], "--name: expected up to 100 letters, digits"),
        (["run", f"{TOY}X"], "'WORKLOADX'; did you mean 'WORKLOAD'?"),
        (["run", "toy_package.workload:train"], "expected a heliostat Workload"),
        (["run", "no.such_module:WORKLOAD"], "no module 'no'"),
        (["resume", "a"], "found no runs there"),
        (["report", "a"], "found no runs there"),
    ],
)
def test_a_mistake_exits_with_2_and_leaves_nothing(terminal, arguments, said):
    assert terminal.run(*arguments) == 2
    assert said in terminal.err
    assert terminal.out == ""
    assert not terminal.runs.exists()


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["run"], ["run", TOY, "--jsn"], ["list", "a=b"]]
)
def test_a_mistyped_command_exits_with_2(terminal, arguments):
    with pytest.raises(SystemExit) as caught:
        terminal.run(*arguments)
    assert caught.value.code == 2


def test_a_taken_name_is_refused_and_its_run_left_alone(terminal):
    terminal.run("run", TOY, "--name", "a", "steps=2")
    before = (terminal.runs / "a" / "result.json").read_text()
    assert terminal.run("run", TOY, "--name", "a", "steps=3") == 2
    assert "the name 'a' is taken" in terminal.err
    assert (terminal.runs / "a" / "result.json").read_text() == before


def test_a_finished_or_unknown_run_is_not_resumed(terminal):
    terminal.run("run", TOY, "--name", "tidal", "steps=2")
    assert terminal.run("resume", "tidal") == 2
    assert "has finished" in terminal.err
    assert terminal.run("resume", "tidel") == 2
    assert "did you mean 'tidal'?" in terminal.err


@pytest.mark.parametrize(("file", "text"), [("environment.json", "{"), ("recipe.yaml", "- 1")])
def test_a_run_of_torn_files_is_not_resumed(terminal, file, text):
    terminal.run("run", TOY, "--name", "a", "steps=2")
    (terminal.runs / "a" / file).write_text(text)
    assert terminal.run("resume", "a") == 2
    assert "missing or torn" in terminal.err


def test_a_role_that_fails_exits_with_1_and_its_story(terminal, monkeypatch):
    from toy_package.workload import Judge

    def score(self: Judge, weights: object) -> float:
        raise ArithmeticError("no score today")

    monkeypatch.setattr(Judge, "score", score)
    assert terminal.run("run", TOY, "--name", "a", "steps=2", "--json") == 1
    assert "judge[0].score on this process raised ArithmeticError" in terminal.err
    assert terminal.out == ""
    terminal.run("runs")
    assert "failed" in terminal.out


def test_runs_and_reports_are_read_from_the_folder_alone(terminal, monkeypatch):
    terminal.run("run", TOY, "--name", "a", "steps=2")
    monkeypatch.setitem(sys.modules, "toy_package.workload", None)
    assert terminal.run("runs") == 0
    (_, row) = terminal.out.splitlines()
    assert row.split()[:5] == ["a", TOY, row.split()[2], "finished", "2/2"]
    assert terminal.run("report", "a") == 0
    page = Path(terminal.out.strip())
    assert page == terminal.runs / "a" / "report.html"
    assert "Least squares by stochastic gradients." in page.read_text()


def test_the_doctor_lists_what_a_recipe_lacks_instead_of_giving_up(terminal):
    assert terminal.run("doctor", "t1", "questions=none.jsonl", "layout=in_process") == 1
    (finding,) = [line for line in terminal.out.splitlines() if line.split()[1] == "recipe"]
    assert finding.startswith("missing")
    assert "found none at 'none.jsonl'" in finding
    assert "1 missing" in terminal.out.splitlines()[-1]
    assert terminal.run("doctor", "t1", "stepz=1") == 2


def test_the_doctor_has_nothing_against_this_machine(terminal):
    assert terminal.run("doctor", TOY) == 0
    assert terminal.out.splitlines()[-1].startswith("0 missing")


# ---------------------------------------------------------------------------- processes


def environment() -> dict[str, str]:
    """The tests' settings without their import path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_users_workload_runs_from_its_own_folder(tmp_path):
    command = [*HELIOSTAT, "run", TOY, "--name", "a", "--json", "--runs", str(tmp_path), "steps=3"]
    done = subprocess.run(
        command, cwd=TESTS, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["run"] == "a"
    assert "a 3/3 steps" in done.stderr


@pytest.mark.parametrize(
    ("program", "package"),
    [
        (HELIOSTAT, "envs"),
        (HELIOSTAT, "heliostat"),
        ([sys.executable, "-m", "cluster.cli"], "envs"),  # puts the working folder first
    ],
)
def test_a_folder_that_hides_our_packages_is_refused_with_both_paths(tmp_path, program, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [*program, "run", "mine.inner:WORKLOAD"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    ours = TESTS.parent / ("platform/heliostat" if package == "heliostat" else package)
    assert done.returncode == 2
    assert str(tmp_path / package) in done.stderr
    assert str(ours) in done.stderr
    assert not (tmp_path / "runs").exists()


def patience(seconds: float) -> float:
    """Returns the seconds that a wait takes on this machine, which others may be using too."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Background:
    """A run in a process of its own."""

    def __init__(self, runs: Path, *overrides: str) -> None:
        self.folder = RunFolder(runs / "a")
        command = [*HELIOSTAT, "run", TOY, "--name", "a", "--json", "--runs", str(runs), *overrides]
        self.process = subprocess.Popen(
            command,
            cwd=TESTS,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, what: Callable[[RunFolder], bool]) -> None:
        deadline = time.monotonic() + patience(60)
        while not what(self.folder):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ends(self, within_s: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=patience(within_s))
        return self.process.returncode, out, err


@pytest.fixture
def background(tmp_path) -> Iterator[Callable[..., Background]]:
    started: list[Background] = []

    def start(*overrides: str) -> Background:
        started.append(Background(tmp_path / "runs", *overrides))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def done(steps: int) -> Callable[[RunFolder], bool]:
    return lambda folder: any(row["step"] >= steps for row in read_metrics(folder.path))


def begun(folder: RunFolder) -> bool:
    return any(event["event"] == "began" for event in folder.events.read())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict[str, float], list[float]]:
    """Final metrics and losses of the run that nobody disturbs."""
    runs = tmp_path_factory.mktemp("undisturbed")
    assert cli.main(["run", TOY, "--name", "a", "--runs", str(runs), f"steps={STEPS}"]) == 0
    return outcome(RunFolder(runs / "a"))


def outcome(folder: RunFolder) -> tuple[dict[str, float], list[float]]:
    losses = [row["train/loss"] for row in read_metrics(folder.path)]
    return json.loads(folder.result.read_text()), losses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_run_and_it_resumes_to_the_same_numbers(
    background, terminal, undisturbed, number
):
    run = background(f"steps={STEPS}", "pause_s=0.02")
    run.wait_for(done(12))
    run.process.send_signal(number)
    code, out, err = run.ends(within_s=10)
    assert code == 1
    assert json.loads(out) == {"run": "a", "folder": str(run.folder.path), "metrics": {}}
    assert f"heliostat resume a --runs {terminal.runs}" in err
    assert not run.folder.result.exists()
    assert terminal.run("resume", "a", "--json") == 0
    assert (terminal.answer()["metrics"], outcome(run.folder)[1]) == undisturbed


def test_a_killed_run_resumes_to_the_same_numbers(background, terminal, undisturbed):
    run = background(f"steps={STEPS}", "pause_s=0.02")
    run.wait_for(done(15))  # five steps after the checkpoint, which are done again
    run.process.kill()
    run.ends(within_s=10)
    terminal.run("runs")
    assert "interrupted" in terminal.out
    assert terminal.run("resume", "a") == 0
    assert outcome(run.folder) == undisturbed


def test_a_call_that_does_not_end_is_left_within_ten_seconds(background):
    run = background("pause_s=600")
    run.wait_for(begun)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.ends(within_s=10)
    assert (code, out) == (1, "")
    assert "did not save within 7 s" in err
    assert "heliostat resume a --runs" in err


def test_a_second_signal_ends_it_at_once(background):
    run = background("pause_s=600")
    run.wait_for(begun)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda folder: folder.stop.exists())
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.ends(within_s=10)
    assert code == 1
    assert "left at once" in err  # and not for want of a checkpoint, seven seconds later
