"""Python environments of their own for the libraries that benchmarks are run against."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PEERS = ROOT / ".venv" / "peers"


def peer_python(name: str, *requirements: str, locked: bool = True) -> Path:
    """Returns the interpreter of a peer's own environment, making it the first time.

    Args:
        name: of the environment.
        requirements: what pip installs into it, versions pinned.
        locked: whether what both need comes in the versions of ``requirements.lock``.

    Raises:
        CalledProcessError: pip could not install it; its output says why.
    """
    folder = _PEERS / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == " ".join(requirements):
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraint = ["--constraint", str(ROOT / "requirements.lock")] if locked else []
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *constraint, *requirements], check=True)
    ready.write_text(" ".join(requirements))
    return python
