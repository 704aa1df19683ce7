"""A Ray cluster's Jobs endpoint, asked with deadlines and answered for in one line."""

from __future__ import annotations

import json
import logging
import os
import shlex
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it once, when it is imported

import ray
import requests
from ray.job_submission import JobSubmissionClient

from heliostat.errors import RunFailed, UsageError

State = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_CONNECT_S, _ANSWER_S = 4.0, 8.0
_AGENT_S, _PAUSE_S = 60.0, 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What the cluster says of a submission."""

    state: State
    message: str

    @property
    def ended(self) -> bool:
        """Whether it will not go on."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Cluster:
    """One endpoint, such as ``http://127.0.0.1:8265``, and the token for it."""

    address: str
    token: str | None = None
    """None takes Ray's own places: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, the file in the home; an
    empty one sends none."""

    def check(self) -> None:
        """Makes sure that a Ray of our version answers and lets us in.

        Raises:
            UsageError: it does not; says why and what to do, within fifteen seconds.
        """
        if not self.address.startswith(("http://", "https://")):
            raise UsageError(
                f"--address: expected the http(s) address of a Ray dashboard, such as "
                f"http://host:8265, found {self.address!r}"
            )
        found = self._get("/api/version").get("ray_version")
        if found != ray.__version__:
            raise UsageError(
                f"expected Ray {ray.__version__} at {self.address}, as installed here, found "
                f"{found}; make the two equal"
            )
        self._get("/api/jobs/")  # the version is told without a token, jobs are not

    def nodes(self) -> Sequence[Mapping[str, float]]:
        """Returns the resources of each node that is alive."""
        answer = self._get("/api/v0/nodes?detail=1&limit=10000")
        rows = cast("list[dict[str, Any]]", answer["data"]["result"]["result"])
        return [row["resources_total"] or {} for row in rows if row["state"] == "ALIVE"]

    def submit(
        self,
        name: str,
        entrypoint: str,
        folder: Path,
        variables: Mapping[str, str],
        metadata: Mapping[str, str],
    ) -> None:
        """Uploads ``folder``, which Ray addresses by its content, and starts ``entrypoint`` in it.

        Raises:
            RunFailed: the cluster refuses the job.
        """
        environment = {"working_dir": str(folder), "env_vars": dict(variables)}
        until = time.monotonic() + _AGENT_S
        while True:
            try:
                self._client().submit_job(
                    entrypoint=entrypoint,
                    submission_id=name,
                    runtime_env=environment,
                    metadata=dict(metadata),
                )
            except (RuntimeError, requests.RequestException) as error:
                if "No available agent" in str(error) and time.monotonic() < until:
                    time.sleep(_PAUSE_S)  # a head that has just started
                    continue
                raise RunFailed(f"{self.address} refused the job: {error}") from error
            return

    def job(self, name: str) -> Job | None:
        """Returns what became of a submission; None where the cluster knows of none."""
        found = self._request("GET", f"/api/jobs/{urllib.parse.quote(name)}")
        if found is None:
            return None
        return Job(found["status"], found.get("message") or "")

    def stop(self, name: str) -> None:
        """Asks Ray to end the job: SIGTERM, then SIGKILL; a pending one is not touched by it."""
        self._request("POST", f"/api/jobs/{urllib.parse.quote(name)}/stop")

    def end_pending(self, name: str) -> None:
        """Ends a job that Ray has not started, whose own stop does nothing then (ray#58353).

        A second job, which asks for nothing, kills the actor that would have run the first.
        """
        code = (
            "import ray; ray.init(); ray.kill(ray.get_actor("
            f"'_ray_internal_job_actor_{name}', namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
        )
        entrypoint = shlex.join(["python", "-c", code])
        with tempfile.TemporaryDirectory() as nothing:
            folder = Path(nothing)
            (folder / "README").write_text("ends a pending job")
            self.submit(f"{name}-end-{time.time_ns()}", entrypoint, folder, {}, {"ends": name})

    def unfinished(self) -> int | None:
        """Returns how many submissions have not ended; None where there was none yet."""
        jobs = [job for job in self._get("/api/jobs/") if job["type"] == "SUBMISSION"]
        return sum(job["status"] not in ENDED for job in jobs) if jobs else None

    def delete(self, name: str) -> None:
        """Makes the cluster forget a job that has ended."""
        self._request("DELETE", f"/api/jobs/{urllib.parse.quote(name)}")

    def _client(self) -> JobSubmissionClient:
        for module in ("dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
            logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)
        return JobSubmissionClient(self.address, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        token = _own_token() if self.token is None else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        found = self._request("GET", path)
        if found is None:
            raise UsageError(f"expected a Ray dashboard at {self.address}, found no {path} there")
        return found

    def _request(self, method: str, path: str) -> Any:  # noqa: ANN401 - JSON
        url = self.address.rstrip("/") + path
        try:
            answer = requests.request(
                method, url, headers=self._headers(), timeout=(_CONNECT_S, _ANSWER_S)
            )
        except requests.RequestException as error:
            reason = "no answer in time" if isinstance(error, requests.Timeout) else "no connection"
            raise UsageError(
                f"{self.address}: {reason}; check that the cluster runs and that this is its "
                "dashboard's address (port 8265 by default)"
            ) from error
        if answer.status_code in (401, 403):
            if self.token == "":
                raise UsageError(
                    f"{self.address}: needs a token, and only the run's folder names this address; "
                    "if you trust it, set RAY_API_SERVER_ADDRESS to it"
                )
            raise UsageError(
                f"{self.address}: {'needs a token' if answer.status_code == 401 else 'wrong token'}"
                "; put the cluster's into RAY_AUTH_TOKEN or, as a file, RAY_AUTH_TOKEN_PATH"
            )
        if answer.status_code == 404:
            return None
        if not answer.ok:
            raise RunFailed(f"{method} {url}: {answer.status_code} {answer.text[:300]}")
        try:
            return answer.json()
        except json.JSONDecodeError:
            raise UsageError(
                f"expected a Ray dashboard at {self.address}, found a server that answers {path} "
                f"with {answer.text[:60]!r}"
            ) from None


def _own_token() -> str | None:
    """Returns the token that Ray's own commands would send."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if named and not path.is_file():
        raise UsageError(f"RAY_AUTH_TOKEN_PATH: expected a token's file, found none at {named}")
    return path.read_text().strip() if path.is_file() else None


def named_clusters() -> set[str]:
    """Returns the addresses that this user has given, now or to an earlier submission."""
    path = _list_of_clusters()
    earlier = path.read_text().splitlines() if path.is_file() else []
    return {os.environ.get("RAY_API_SERVER_ADDRESS", "").rstrip("/"), *earlier} - {""}


def remember_cluster(address: str) -> None:
    """Notes that the user has named this address, so that tokens may go there."""
    if address in named_clusters():
        return
    path = _list_of_clusters()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{address}\n")


def _list_of_clusters() -> Path:
    return Path.home() / ".config" / "heliostat" / "clusters"
