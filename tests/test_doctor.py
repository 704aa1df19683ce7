"""The doctor finds what a run would lack, starts nothing and gives no secret away."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.doctor import Finding, examine, format_findings
from heliostat.errors import UsageError
from heliostat.layout import Layout
from heliostat.recipe import Recipe
from heliostat.workload import Workload

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _bare_settings(tmp_path, monkeypatch):
    for name in (
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "TORCH_EXTENSIONS_DIR",
        "WANDB_API_KEY",
        "WANDB_BASE_URL",
        "WANDB_MODE",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)


def found(subject: str, recipe: Recipe | None = None, workload: Workload | None = None) -> Finding:
    return next(finding for finding in examine(workload, recipe) if finding.subject == subject)


def recipe_of(*overrides: str) -> Recipe:
    return Recipe(steps=1).override(*overrides)


def test_it_ends_in_seconds_with_nothing_missing_here(tmp_path):
    began = time.process_time()
    findings = examine(None, recipe_of())
    assert time.process_time() - began < 10
    assert [finding for finding in findings if finding.level == "missing"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_it_never_imports_ray():
    code = (
        "import sys; from cluster.doctor import examine; from heliostat.recipe import *;"
        "examine(None, Recipe(steps=1, layout=Layout.laptop())); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("countdown", "4 problems"),
        ("gymnasium", "CartPole-v1 takes a step"),
        ("gymnasium MuJoCo", "InvertedPendulum-v5 takes a step on mujoco"),
        ("PettingZoo", "takes a step with"),
    ],
)
def test_one_environment_of_each_family_takes_a_step(family, said):
    finding = found(family)
    assert finding.level == "ok"
    assert said in finding.text


def test_a_family_that_is_not_installed_is_a_warning_with_its_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    finding = found("gymnasium")
    assert finding.level == "warning"
    assert "family unavailable: ModuleNotFoundError: import of gymnasium halted" in finding.text
    assert "pip install" in finding.remedy


def test_every_requirement_is_compared_with_what_is_installed():
    findings = {finding.subject: finding for finding in examine(None, None)}
    assert {"python", "ray", "torch", "numpy"} <= findings.keys()
    assert findings["ray"] == Finding("ok", "ray", "2.60.0")
    assert "ruff" not in findings  # an extra of developers


def test_a_layout_beyond_this_machine_shows_what_it_wants():
    recipe = recipe_of("layout.learners=3", "layout.learner_cpus=400", "layout.learner_gpus=2")
    finding = found("layout CPUs", recipe)
    assert finding.level == "missing"
    assert "1200 wanted in all, 400 at most by one actor" in finding.text
    assert "3 learners of 400" in finding.text
    assert "layout=in_process" in finding.remedy
    assert found("layout GPUs", recipe).text.startswith("6 wanted in all, 2 at most")


def test_an_elastic_layout_is_held_by_its_least():
    recipe = recipe_of("layout.learners=300", "layout.min_learners=1", "layout.learner_cpus=1")
    assert found("layout CPUs", recipe).text.startswith("1 wanted in all")


def test_only_the_families_of_the_workloads_roles_are_counted():
    workload = Workload(
        name="toy",
        summary="",
        paper="",
        recipes={"tiny": Recipe(steps=1)},
        train="toy:train",
        roles={"readers": "role_of_doctor:Reader", "writers": "role_of_doctor:Reader"},
    )
    Path("role_of_doctor.py").write_text("class Reader:\n    family = 'data'\n")
    recipe = recipe_of("layout.data.hosts=2", "layout.environment.hosts=500")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path.cwd()))
        assert found("layout CPUs", recipe, workload).text.startswith("4 wanted in all")
    sys.modules.pop("role_of_doctor")
    assert found("layout CPUs", recipe).text.startswith("502 wanted in all")


@pytest.mark.parametrize("path", ["no_such_module:Reader", "needs_more:Reader"])
def test_roles_that_cannot_be_imported_are_missing(path):
    Path("needs_more.py").write_text("import a_library_that_is_not_there")
    workload = Workload(
        name="toy", summary="", paper="", recipes={}, train="toy:train", roles={"readers": path}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path.cwd()))
        finding = found("roles", recipe_of(), workload)
    assert finding.level == "missing"
    assert ("no_such_module" if "no_such" in path else "a_library_that") in finding.text


def test_a_given_cluster_is_left_to_the_launch(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray.example:6379")
    finding = found("layout", recipe_of("layout.learners=500"))
    assert finding.level == "ok"
    assert "when a run starts" in finding.text


def test_deepspeed_wants_compilers(monkeypatch):
    monkeypatch.setenv("PATH", "")
    recipe = recipe_of("layout.parallelism=deepspeed")
    assert found("g++", recipe).level == "missing"
    assert found("ninja", recipe).remedy == "pip install ninja"
    assert "g++" not in {finding.subject for finding in examine(None, recipe_of())}


def test_a_lock_left_by_a_killed_build_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    finding = found("deepspeed build", recipe_of("layout.parallelism=deepspeed"))
    assert finding.level == "warning"
    assert str(lock) in finding.text


def test_what_a_recipe_lacks_is_reported_and_not_raised():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Reading(Recipe):
        def check(self) -> None:
            raise UsageError("expected corpus.txt, found no such file; run make corpus")

    finding = found("recipe", Reading(steps=1))
    assert (finding.level, "corpus.txt" in finding.text) == ("missing", True)


def test_a_runs_folder_that_cannot_be_written_is_missing(tmp_path):
    (tmp_path / "file").touch()
    findings = examine(None, None, runs=tmp_path / "file" / "runs")
    finding = next(finding for finding in findings if finding.subject == "runs folder")
    assert (finding.level, finding.remedy) == ("missing", "choose another with --runs")


def test_offline_is_the_default_of_wandb():
    assert found("W&B").text.startswith("offline")


def test_online_wandb_without_a_key_is_a_warning(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert found("W&B") == Finding(
        "warning", "W&B", "online without a key: runs will be logged offline", "wandb login"
    )


def test_a_mode_that_wandb_does_not_have_is_missing(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    assert found("W&B").level == "missing"


def test_no_secret_is_ever_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("RAY_AUTH_TOKEN", KEY)
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (tmp_path / "home" / ".netrc").chmod(0o600)
    findings = examine(None, recipe_of())
    assert Finding("ok", "W&B", "online, with a key") in findings
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert KEY not in format_findings(findings + examine(None, recipe_of()))


def test_ray_without_tokens_is_a_warning(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert found("Ray token").level == "warning"


def test_a_token_file_is_kept_from_others(tmp_path, monkeypatch):
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert "found none" in found("Ray token").text
    token.write_text(KEY)
    token.chmod(0o644)
    assert found("Ray token").remedy == f"chmod 600 {token}"
    token.chmod(0o600)
    assert found("Ray token").level == "ok"


def test_a_bare_machine_is_examined_without_a_recipe():
    subjects = {finding.subject for finding in examine(None, None)}
    assert {"CPUs", "GPU", "memory", "disk"} <= subjects
    assert not {"layout CPUs", "recipe", "shared memory"} & subjects


def test_shared_memory_matters_only_where_ray_is_used():
    recipe = Recipe(steps=1, layout=Layout.laptop())
    assert "Ray's object store" in found("shared memory", recipe).text


def test_findings_are_aligned_and_counted():
    text = format_findings(
        [Finding("ok", "disk", "fine"), Finding("missing", "compiler", "none", "install one")]
    )
    assert text.splitlines() == [
        "ok       disk      fine",
        "missing  compiler  none",
        "                   -> install one",
        "1 missing, 0 warning, 1 ok",
    ]
