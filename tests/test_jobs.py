"""Talking to a Jobs endpoint: what is wrong is said in one line, with the remedy, and soon."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.jobs import Cluster
from heliostat.errors import UsageError


@contextmanager
def served(status: int, answer: str) -> Iterator[str]:
    """A server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def refusal(address: str) -> str:
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        Cluster(address).check()
    assert time.monotonic() - began < 15
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nobody_at_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "no connection; check that the cluster runs" in refusal(f"http://127.0.0.1:{port}")


def test_somebody_who_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer in time" in refusal(address)


def test_another_version() -> None:
    with served(200, json.dumps({"ray_version": "2.9.0"})) as address:
        assert f"at {address}, as installed here, found 2.9.0; make the two" in refusal(address)


def test_something_else_than_a_dashboard() -> None:
    with served(200, "<html>hello") as address:
        assert "found a server that answers /api/version with '<html>hello'" in refusal(address)


@pytest.mark.parametrize(("status", "what"), [(401, "needs a token"), (403, "wrong token")])
def test_no_token_or_a_wrong_one(status: int, what: str) -> None:
    with served(status, "no") as address:
        assert f"{what}; put the cluster's into RAY_AUTH_TOKEN" in refusal(address)


@pytest.mark.parametrize("address", ["ray://host:10001", "host:6379", "auto"])
def test_an_address_of_another_kind(address: str) -> None:
    assert "such as http://host:8265, found" in refusal(address)


def test_a_token_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    assert "RAY_AUTH_TOKEN_PATH: expected a token's file" in refusal("http://127.0.0.1:1")


@pytest.mark.ray
def test_a_real_ray_is_asked_for_its_nodes_and_lets_no_stranger_in(
    jobs_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(jobs_address)
    cluster.check()
    assert [node["CPU"] for node in cluster.nodes()] == [os.cpu_count()]
    assert cluster.job("nobody") is None
    with pytest.raises(UsageError, match="wrong token"):
        Cluster(jobs_address, "no").check()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", "/nowhere")
    assert "needs a token" in refusal(jobs_address)
