"""One private Ray for all tests that need one, with more logical CPUs than the machine has."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("heliostat", deadline=None)  # no test measures seconds
settings.load_profile("heliostat")
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

settings.register_profile("untimed", deadline=None)  # speed is measured in benchmarks/ alone
settings.load_profile("untimed")


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
def jobs_address() -> Iterator[str]:
    """A Ray to which jobs are submitted: the address of its dashboard."""
    from cluster.head import private_ray

    folder = Path(tempfile.mkdtemp(prefix="heliostat-"))
    with private_ray(folder) as address:
        yield address
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A place of runs on a local server that speaks S3."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "HELIOSTAT_CACHE": str(tmp_path / "cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    bucket = f"tidal-{secrets.token_hex(4)}"  # buckets outlive their server, not this process
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    yield f"s3://{bucket}/runs"
    server.stop()
