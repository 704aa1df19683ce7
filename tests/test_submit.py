"""Submitting to a real Ray: same numbers as a run, from any folder, and through kills and stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from toy_package.workload import WORKLOAD

from cluster import cli
from cluster.control import status
from cluster.jobs import Cluster
from cluster.places import open_run
from heliostat import launch
from heliostat.folder import RunFolder, replace_text
from heliostat.launch import Order
from heliostat.tracker import read_metrics

pytestmark = [pytest.mark.ray]
TOY = "tidal.workload:WORKLOAD"
SLOW = ("steps=60", "pause_s=0.1", "layout.job.first_pause_s=0")


class Terminal:
    """Runs commands in a folder outside the repository that holds a user's own package."""

    def __init__(self, folder: Path, address: str, capture: pytest.CaptureFixture[str]) -> None:
        self.runs = folder / "runs"
        self.package = folder / "tidal" / "workload.py"
        self.address: str | None = address
        self._capture = capture
        self.out = self.err = ""

    def run(self, *arguments: str) -> int:
        self._capture.readouterr()
        if arguments[0] in ("submit", "resume") and self.address:
            arguments = (*arguments, "--address", self.address)
        code = cli.main(arguments)
        self.out, self.err = self._capture.readouterr()
        return code

    def submit(self, name: str, *arguments: str) -> int:
        return self.run("submit", TOY, "--name", name, *arguments)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.runs / name)

    def await_step(self, name: str, step: int) -> None:
        self.wait_until(lambda: any(r["step"] >= step for r in read_metrics(self.runs / name)))

    def wait_until(self, holds: Callable[[], Any], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.1)


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys, jobs_address) -> Terminal:
    """The package is copied under a name of its own: what runs must be what was shipped."""
    package = tmp_path / "tidal"
    package.mkdir()
    source = Path(WORKLOAD.train.partition(":")[0].replace(".", "/") + ".py")
    text = (Path(__file__).parent / source).read_text()
    (package / "workload.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tidal"]:
        del sys.modules[name]  # a command is a process of its own
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", jobs_address)
    return Terminal(tmp_path, jobs_address, capsys)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The final numbers of ``SLOW``, undisturbed and in process."""
    recipe = WORKLOAD.recipe().override("steps=60")
    folder = RunFolder(tmp_path_factory.mktemp("undisturbed") / "a")
    order = Order(workload=WORKLOAD, spec="toy", recipe=recipe, folder=folder)
    return dict(launch.create(order).metrics)


def told(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")}
        for row in read_metrics(folder)
    ]


def test_a_submitted_run_gives_the_numbers_of_a_run_and_is_submitted_once(terminal):
    assert terminal.run("run", TOY, "--name", "here") == 0
    assert terminal.submit("there", "--follow", "--json") == 0
    answer = json.loads(terminal.out.splitlines()[-1])
    assert answer["run"] == "there"
    assert "uploads" in terminal.err
    assert "the largest:" in terminal.err
    assert told(terminal.runs / "there") == told(terminal.runs / "here")
    assert answer["metrics"] == json.loads(terminal.folder("here").result.read_text())
    record = json.loads(terminal.folder("there").record.read_text())
    job = Cluster(json.loads(terminal.folder("there").job.read_text())["address"])
    assert job.job("there").state == "SUCCEEDED"

    assert terminal.submit("there", "--json") == 0
    assert "run 'there' was submitted before" in terminal.err
    assert terminal.submit("there", "lr=0.2") == 2
    assert "is taken by another run" in terminal.err
    assert terminal.submit("here") == 2
    assert "the name 'here' is taken" in terminal.err

    assert terminal.run("compare", "here", "there") == 0
    assert "lr" not in terminal.out
    assert terminal.run("status", "there", "--json") == 0
    found = json.loads(terminal.out)
    assert (found["status"], found["job"]) == ("finished", "SUCCEEDED")
    assert found["wandb_run_id"] == record["id"]
    assert terminal.run("logs", "there") == 0
    assert "30/30" in terminal.out
    assert terminal.run("rm", "there", "here") == 0
    assert not terminal.folder("there").path.exists()
    assert job.job("there") is None


def test_a_changed_line_is_what_runs(terminal):
    text = terminal.package.read_text()
    terminal.package.write_text(text.replace('"score": score', '"score": 41.0'))
    assert terminal.submit("line", "steps=2", "--follow", "--json") == 0
    assert json.loads(terminal.out)["metrics"]["score"] == 41.0
    terminal.package.write_text(text.replace('"score": score', '"score": 42.0'))
    assert terminal.submit("line-2", "steps=2", "--follow", "--json") == 0
    assert json.loads(terminal.out)["metrics"]["score"] == 42.0


def test_a_stopped_job_saves_and_resumes_to_the_same_numbers(terminal, undisturbed):
    assert terminal.submit("stopped", *SLOW) == 0
    terminal.await_step("stopped", 5)
    assert terminal.run("rm", "stopped") == 2
    assert "heliostat stop stopped" in terminal.err
    assert terminal.run("resume", "stopped") == 2
    assert terminal.run("stop", "stopped") == 0
    assert "saved its checkpoint and left" in terminal.out
    assert status(str(terminal.runs), "stopped")["status"] == "stopped"
    assert terminal.run("stop", "stopped") == 0
    assert "is stopped already" in terminal.out
    assert terminal.run("resume", "stopped", "--follow", "--json") == 0
    assert json.loads(terminal.out)["metrics"] == undisturbed


def test_a_killed_driver_is_resumed_by_its_supervisor(terminal, undisturbed):
    assert terminal.submit("killed", *SLOW) == 0
    terminal.await_step("killed", 25)
    holder = json.loads(terminal.folder("killed").lock.read_text())
    os.kill(holder["pid"], signal.SIGKILL)
    terminal.wait_until(terminal.folder("killed").result.exists)
    assert json.loads(terminal.folder("killed").result.read_text()) == undisturbed
    events = terminal.folder("killed").events.read()
    assert [e["number"] for e in events if e["event"] == "job-attempt"] == [1, 2]
    assert [e["step"] for e in events if e["event"] == "restored"] == [20]


def test_the_methods_own_fault_is_reported_and_not_tried_again(terminal):
    text = terminal.package.read_text()
    fault = "raise LookupError('no tide')\n    model = torch"
    terminal.package.write_text(text.replace("model = torch", fault))
    assert terminal.submit("fault", "--follow") == 1
    assert "LookupError: no tide" in terminal.err
    events = terminal.folder("fault").events.read()
    assert sum(event["event"] == "job-attempt" for event in events) == 1


def test_a_pending_job_is_ended_too(terminal, jobs_address):
    assert terminal.run("run", TOY, "steps=2", "--name", "pending") == 0
    folder = terminal.folder("pending")
    folder.result.unlink()
    folder.events.path.unlink()
    replace_text(folder.job, json.dumps({"address": jobs_address, "head": None}))
    folder.events.add("submitted", address=jobs_address)
    Cluster(jobs_address)._client().submit_job(
        entrypoint="echo never", submission_id="pending", entrypoint_num_cpus=1000
    )
    assert status(str(terminal.runs), "pending")["job"] == "PENDING"
    assert terminal.run("stop", "pending", "--deadline", "1") == 0
    assert status(str(terminal.runs), "pending")["job"] in ("FAILED", "STOPPED")


def test_what_the_cluster_cannot_hold_is_refused_before_anything_is_sent(terminal):
    assert terminal.submit("large", "layout=one_gpu") == 2
    assert "the layout does not fit the cluster" in terminal.err
    assert "GPUs" in terminal.err
    assert not terminal.folder("large").path.exists()


@pytest.mark.parametrize("head", [None, "elsewhere", "ours"])
def test_a_foreign_folder_gets_no_token(terminal, monkeypatch, tmp_path, head):
    """Whatever a run's folder says, tokens go to clusters that the user has named."""
    heard: list[str | None] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(self.headers["Authorization"])
            self.send_response(401)
            self.end_headers()

        def log_message(self, *_): ...

    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        place = tmp_path / "elsewhere"
        up = {"address": address, "pid": os.getpid()}
        if head == "ours":  # a head of this user's that serves another address
            place = Path(tempfile.mkdtemp(prefix="heliostat-head-"))
            up["address"] = "http://127.0.0.1:1"
        place.mkdir(exist_ok=True)
        (place / "head.json").write_text(json.dumps(up))
        (place / "token").write_text("hush")
        folder = terminal.folder("foreign")
        folder.path.mkdir(parents=True)
        folder.recipe.write_text("steps: 1")
        job = {"address": address, "head": str(place) if head else None}
        folder.job.write_text(json.dumps(job))
        assert terminal.run("status", "foreign", "--json") == 0
        assert json.loads(terminal.out)["job"] == "unknown"
        server.shutdown()
        shutil.rmtree(place)
    assert heard == [None]


def test_a_private_ray_that_has_ended_or_was_killed_is_not_asked(terminal, tmp_path):
    folder = terminal.folder("left")
    folder.path.mkdir(parents=True)
    folder.recipe.write_text("steps: 1")
    with subprocess.Popen(["true"]) as killed:
        killed.wait()
    head = tmp_path / "head"
    job = {"address": "http://127.0.0.1:1", "head": str(head)}
    folder.job.write_text(json.dumps(job))
    for left_behind in (None, {"address": job["address"], "pid": killed.pid}):
        head.mkdir(exist_ok=True)
        if left_behind:
            (head / "head.json").write_text(json.dumps(left_behind))
        assert status(str(terminal.runs), "left")["job"] is None


def test_no_secret_travels_with_a_submission(terminal, monkeypatch, jobs_address):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_PROJECT", "tides")
    assert terminal.submit("secret", "steps=2", "--follow") == 0
    told = Cluster(jobs_address)._request("GET", "/api/jobs/secret")
    assert told["runtime_env"]["env_vars"]["WANDB_PROJECT"] == "tides"
    record = json.loads(terminal.folder("secret").record.read_text())
    assert told["metadata"] == {
        "run": "secret",
        "workload": TOY,
        "recipe": record["fingerprint"],
        "code": record["code"],
        "wandb_run_id": record["id"],
    }
    text = json.dumps(told) + "".join(
        path.read_text(errors="replace")
        for path in terminal.folder("secret").path.glob("*")
        if path.is_file()
    )
    assert "k" * 40 not in text
    assert os.environ["RAY_AUTH_TOKEN"] not in text
    shutil.rmtree(terminal.folder("secret").path)


@pytest.mark.long
def test_without_an_address_a_private_ray_serves_a_run_in_a_bucket_and_ends_with_it(
    terminal, bucket, undisturbed, monkeypatch, tmp_path
):
    """Submitted, stopped from another machine, resumed from it, and read from it."""
    terminal.address = None
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    assert terminal.submit("far", *SLOW, "--runs", bucket) == 0
    head = Path(json.loads(open_run(bucket, "far").job.read_text())["head"])
    assert head.is_dir()
    assert stat.S_IMODE((head / "token").stat().st_mode) == 0o600
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "elsewhere"))
    terminal.wait_until(lambda: status(bucket, "far")["step"] >= 5)
    assert terminal.submit("far", *SLOW, "--runs", bucket) == 0
    assert "was submitted before" in terminal.err
    assert terminal.run("stop", "far", "--runs", bucket) == 0
    assert "saved its checkpoint and left" in terminal.out
    assert terminal.run("resume", "far", "--runs", bucket, "--follow", "--json") == 0
    assert json.loads(terminal.out)["metrics"] == undisturbed
    assert json.loads(terminal.out)["folder"] == f"{bucket}/far"
    terminal.wait_until(lambda: not head.exists())
    assert terminal.run("logs", "far", "--runs", bucket) == 0
    assert "60/60" in terminal.out
    assert terminal.run("report", "far", "--runs", bucket) == 0
    assert terminal.run("rm", "far", "--runs", bucket) == 0
    assert terminal.run("runs", "--runs", bucket) == 0
    assert "no runs" in terminal.out
