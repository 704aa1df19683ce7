"""What a submission ships: what runs, all of it, and nothing that should stay at home."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.packing import LIMIT_BYTES, looks_secret, pack
from heliostat.errors import UsageError
from heliostat.workload import OWN_PACKAGES

PACKAGES = (*OWN_PACKAGES, "tidal")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "home" / "tidal"
    package.mkdir(parents=True)
    (package / "workload.py").write_text("X = 1\n")
    (package / "data").mkdir()
    (package / "data" / "rows.json").write_text("[]")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.syspath_prepend(str(tmp_path / "home"))
    return package


def test_our_packages_and_the_users_own_are_shipped_as_they_are(home: Path, tmp_path: Path) -> None:
    package = pack(PACKAGES, (), tmp_path / "out")
    for name in (
        "heliostat/run.py",
        "algorithms/catalog.py",
        "envs/countdown.py",
        "cluster/cli.py",
    ):
        assert (tmp_path / "out" / name).is_file(), name
    assert (tmp_path / "out" / "tidal" / "data" / "rows.json").read_text() == "[]"
    assert (tmp_path / "out" / "cluster" / "report.html.j2").is_file()
    shipped = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert shipped == set(package.sizes)


def test_caches_repositories_and_environments_stay_at_home(home: Path, tmp_path: Path) -> None:
    for name in (
        "__pycache__/a.pyc",
        ".git/config",
        ".venv/bin/python",
        "wandb/run.wandb",
        "data/.gitignore",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    package = pack(PACKAGES, (), tmp_path / "out")
    assert {name for name in package.sizes if name.startswith("tidal")} == {
        "tidal/workload.py",
        "tidal/data/rows.json",
    }


@pytest.mark.parametrize(
    "name", [".env", "id_rsa", "server.pem", "credentials.json", ".netrc", "prod.env", "id_ecdsa"]
)
def test_what_looks_like_a_secret_is_refused_unless_asked_for(
    home: Path, tmp_path: Path, name: str
) -> None:
    (home / name).write_text("hush")
    with pytest.raises(UsageError, match=rf"tidal/{name}.*--ship-secrets"):
        pack(PACKAGES, (), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert f"tidal/{name}" in pack(PACKAGES, (), tmp_path / "out", secrets=True).sizes


@pytest.mark.parametrize("name", ["credentials.py", ".env.example", "id_rsa.pub", "keys.json"])
def test_ordinary_files_do_not_look_like_secrets(name: str) -> None:
    assert not looks_secret(f"package/{name}")


def test_links_that_lead_out_of_a_package_are_not_followed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("hush")
    (home / "link").symlink_to(tmp_path / "private")
    assert "tidal/link" not in pack(PACKAGES, (), tmp_path / "out").sizes


def test_further_files_are_shipped_under_their_own_names(home: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    assert "rows.jsonl" in pack(PACKAGES, [tmp_path / "rows.jsonl"], tmp_path / "out").sizes
    with pytest.raises(
        UsageError, match=r"--ship: expected a file or folder, found none at .*gone"
    ):
        pack(PACKAGES, [tmp_path / "gone"], tmp_path / "out2")


def test_a_folder_that_shadows_one_of_ours_is_refused(home: Path, tmp_path: Path) -> None:
    theirs = home.parent / "envs"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    with pytest.raises(UsageError, match=r"has the name of heliostat's own package"):
        pack(PACKAGES, (), tmp_path / "out")


def test_an_upload_that_is_too_large_is_refused_with_its_largest_files(
    home: Path, tmp_path: Path
) -> None:
    with (home / "weights.bin").open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)
    with pytest.raises(
        UsageError, match=r"at most 200.0 MiB, found: .*tidal/weights.bin 200.0 MiB"
    ):
        pack(PACKAGES, (), tmp_path / "out")


def test_the_size_is_told_with_the_largest_files(home: Path, tmp_path: Path) -> None:
    (home / "big.bin").write_bytes(bytes(3 * 2**20))
    told = pack(PACKAGES, (), tmp_path / "out").describe()
    assert "the largest: tidal/big.bin 3.0 MiB" in told


def test_a_package_that_is_not_there_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no package 'neap' to ship"):
        pack(["neap"], (), tmp_path / "out")
