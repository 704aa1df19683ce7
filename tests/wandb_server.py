"""A W&B server on the loopback interface, as far as the client of version 0.31 needs one.

It answers the GraphQL calls that open, resume and end a run, takes the rows and files that the
client uploads, and keeps every byte that it was sent.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast


@dataclass
class ServedRun:
    """What the server knows of one run."""

    config: str = "{}"
    summary: str = "{}"
    rows: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    """Group, job type, tags and the like, as they were last sent."""

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.rows]


class WandbServer:
    """Serves within a ``with`` block; ``runs`` and ``received`` may be read at any time."""

    def __init__(self) -> None:
        self.runs: dict[str, ServedRun] = {}
        self.artifacts: list[dict[str, Any]] = []
        """What was said of each when it was created, those that hold tables too."""
        self.received: list[bytes] = []
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def query(self, operation: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """Answers one GraphQL operation; None where the server does not know it."""
        answers = {
            "Viewer": self._viewer,
            "RunResumeStatus": self._resume_status,
            "UpsertBucket": self._upsert,
            "CreateRunFiles": self._upload_urls,
            "CreateArtifact": self._artifact,
        }
        return answers[operation](variables) if operation in answers else None

    def stream(self, run_id: str, update: dict[str, Any]) -> None:
        """Takes rows at their offset, the summary and the exit code."""
        run = self.runs.setdefault(run_id, ServedRun())
        for name, chunk in update.get("files", {}).items():
            if name == "wandb-history.jsonl":
                run.rows[chunk["offset"] :] = chunk["content"]
            elif name == "wandb-summary.json":
                run.summary = chunk["content"][-1]
        if update.get("complete"):
            run.exit_code = update["exitcode"]

    def _project(self) -> dict[str, Any]:
        return {"id": "p", "name": "project", "entity": {"id": "e", "name": "tester"}}

    def _viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        viewer = {"id": "u", "entity": "tester", "username": "tester", "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"]
        if run_id not in self.runs:
            return {"model": {**self._project(), "bucket": None}}
        run = self.runs[run_id]
        bucket = {
            "id": run_id,
            "name": run_id,
            "displayName": run_id,
            "summaryMetrics": run.summary,
            "config": run.config,
            "historyLineCount": len(run.rows),
            "historyTail": json.dumps(run.rows[-1:]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": run.labels.get("tags", []),
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": {**self._project(), "bucket": bucket}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"]
        new = run_id not in self.runs
        run = self.runs.setdefault(run_id, ServedRun())
        run.config = variables["config"] or run.config
        run.labels |= {name: value for name, value in variables.items() if value}
        bucket = {
            "id": run_id,
            "name": run_id,
            "displayName": variables["displayName"],
            "description": "",
            "config": run.config,
            "sweepName": None,
            "project": self._project(),
            "historyLineCount": len(run.rows),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": new}}

    def _upload_urls(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["run"]
        files = [
            {"name": name, "uploadUrl": f"{self.url}/upload/{run_id}/{name}"}
            for name in variables["files"]
        ]
        return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}

    def _artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.artifacts.append(variables)
        latest = {"latestArtifact": {"id": "a"}}
        known = {"id": "a", "state": "COMMITTED", "artifactSequence": latest}
        return {"createArtifact": {"artifact": known}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: WandbServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports what is not a client that hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        owner, body = self._owner(), self._body()
        if self.path == "/graphql":
            call = json.loads(body)
            data = owner.query(call.get("operationName", ""), call.get("variables") or {})
            self._reply({"data": data} if data else {"errors": [{"message": "unknown"}]})
        elif self.path.endswith("/file_stream"):
            owner.stream(self.path.split("/")[-2], json.loads(body))
            self._reply({"limits": {}})
        else:
            self._reply({}, status=404)

    def do_PUT(self) -> None:
        owner, body = self._owner(), self._body()
        _, _, run_id, name = self.path.split("/", 3)
        owner.runs[run_id].files[name] = body
        self._reply({})

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _owner(self) -> WandbServer:
        return cast("_Server", self.server).owner

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._owner().received.append(body)
        return body

    def _reply(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
