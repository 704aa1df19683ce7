"""One private Ray for all tests that need one, with more logical CPUs than the machine has."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.append(str(TESTS))

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["OMP_NUM_THREADS"] = "1"  # as a host of one CPU has it
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["WANDB_MODE"] = "disabled"
os.environ["WANDB_SILENT"] = "true"
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Starts a local Ray with eight logical CPUs; yields its address."""
    import ray

    folder = tempfile.mkdtemp(prefix="heliostat-")
    context = ray.init(
        address="local", num_cpus=8, include_dashboard=True, _temp_dir=folder, log_to_driver=False
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def jobs_address(ray_cluster: str) -> str:
    """The address of the same Ray's dashboard, to which jobs are submitted."""
    import ray

    return f"http://{ray.init(ignore_reinit_error=True).dashboard_url}"
