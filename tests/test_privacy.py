from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliostat.events import EventLog
from heliostat.privacy import public_config, scrub


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apiKey", "WANDB_API_KEY", "hf_token", "HFToken", "password", "db.passwd"),
        *("client_secret", "secret_name", "aws_secret_access_key", "credentials", "auth"),
        *("pwd", "DB_PWD", "pat", "GITHUB_PAT", "TOKEN_VALUE", "access_key_id", "api_keys", "key"),
        *("HUB_TOKENS", "token", "refresh_token"),
    ],
)
def test_values_under_secret_names_are_masked(name: str):
    assert public_config({"a": [{name: "plain"}]}, {}) == {"a": [{name: "***"}]}
    assert public_config({name: {"nested": 1}}, {}) == {name: "***"}


def test_numbers_and_names_that_only_look_secret_stay():
    config = {
        "max_tokens": 1024,
        "num_keys": 3,
        "tokenizer": "bytes",
        "key_dim": "wide",
        "token_level": "word",
        "use_token": True,
        "api_key": None,
        "monkey": "banana",
        "tokens_per_pass": 16_384,
        "keys": ["position", "velocity"],
        "stop_tokens": ["</s>", "\\n"],
        "pad_token": "<pad>",
        "eos_token_id": 2,
        "sort_key": "length",
        "path": "here",
        "pattern": "a+",
        "author": "ada",
        "token_budget": "wide",
    }
    assert public_config(config, {}) == config


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("use sk-proj-abcdefghijklmnop now", "use *** now"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("ghr_abcdefghijklmnopqrstuvwxyz0123456789", "***"),
        ("ASIAIOSFODNN7EXAMPLE", "***"),
        ("AIzaSyA-1234567890abcdefghijklmnopqrstu", "***"),
        ("pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAwLTAwMDA", "***"),
        ("redis://user:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("https://abcdef0123456789@host/x", "https://***@host/x"),
        ("https://abcdef0123456789:@host/x", "https://***@host/x"),
        ("mysql://ada:p@ss/w:rd@10.0.0.1/db", "mysql://***@10.0.0.1/db"),
        ("postgres://ada:a/b@[::1]:5432/db", "postgres://***@[::1]:5432/db"),
        ("say 'mysql://a:b@h' or \"ftp://c:d@h\"", "say 'mysql://***@h' or \"ftp://***@h\""),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n", "***"),
        ("https://store/x?n=1&X-Amz-Signature=abc&m=2", "https://store/x?n=1***&m=2"),
        ("https://example.org/a:b", "https://example.org/a:b"),
        ("https://example.org/@ada", "https://example.org/@ada"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
        ("ssh://git@host/x.git", "ssh://git@host/x.git"),
        ("hf_tokenizer_of_the_small_model", "hf_tokenizer_of_the_small_model"),
        ("sk-learn-like-random-forests", "sk-learn-like-random-forests"),
        ("login(password='a b', user=ada)", "login(password=***, user=ada)"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("HF_TOKEN=abc python x.py --max_tokens=5", "HF_TOKEN=*** python x.py --max_tokens=5"),
        ("steps: 4\ntoken: abc\nseed: 1", "steps: 4\ntoken: ***\nseed: 1"),
        ("unknown key: 'lr'; did you mean", "unknown key: 'lr'; did you mean"),
        ("risk-averse-policy-with-long-name", "risk-averse-policy-with-long-name"),
    ],
)
def test_credentials_are_known_by_their_form(text: str, shown: str):
    assert public_config({"value": text}, {}) == {"value": shown}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/ada/data", "~/data"),
        ("/srv/ada", "~"),
        ("--out=/srv/ada/x,/srv/ada/y", "--out=~/x,~/y"),
        ("/srv/adaptive", "/srv/adaptive"),
        ("/data/srv/ada", "/data/srv/ada"),
        ("/home/grace/runs", "~/runs"),
        ("file:///Users/grace/runs", "file://~/runs"),
        ("/root/.cache", "~/.cache"),
        ("/mnt/home/grace", "/mnt/home/grace"),
    ],
)
def test_home_folders_become_a_tilde(text: str, shown: str):
    assert public_config({"path": text}, {"HOME": "/srv/ada"}) == {"path": shown}
    assert public_config({"path": Path(text)}, {"HOME": "/srv/ada"}) == {
        "path": public_config({"path": str(Path(text))}, {"HOME": "/srv/ada"})["path"]
    }


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=8),
    st.recursive(
        st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
    ),
)
@settings(deadline=None)
def test_a_secret_of_the_environment_occurs_nowhere(secret: str, rest: Any):
    config = {"x": f"before{secret}after", "list": [secret, {secret: 1}], "rest": rest}
    shown = str(public_config(config, {"DB_PASSWORD": secret}))
    assert repr(secret)[1:-1] not in re.sub(re.escape(repr(rest)), "", shown) or secret in "***"


def test_publishing_leaves_the_config_itself_alone():
    config = {"token": "abc", "list": [{"key": "x"}], "path": ("/root/a",)}
    before = json.dumps(config)
    assert public_config(config, {}) == {"token": "***", "list": [{"key": "***"}], "path": ["~/a"]}
    assert json.dumps(config) == before


@given(st.text())
@settings(deadline=None)
def test_scrubbing_twice_changes_no_more_than_once(text: str):
    once = scrub(text, {})
    assert scrub(once, {}) == once


def test_scrubbing_a_long_text_is_quick():
    start = time.process_time()
    for part in ("a", "a.", "://a", "://a:", "eyJ", "key=", "?", "-----BEGIN "):
        scrub(part * (100_000 // len(part)), {})
    assert time.process_time() - start < 5.0


def test_an_event_tells_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STORE_PASSWORD", "correct-horse-battery")
    log = EventLog(tmp_path / "events.jsonl")
    log.add("failed", reason="correct-horse-battery at redis://:pw@host", step=3)
    (event,) = log.read()
    assert (event["reason"], event["step"]) == ("*** at redis://***@host", 3)
