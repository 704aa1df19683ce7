"""What a submission ships: the sources it runs, gathered, measured and searched for secrets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from heliostat.errors import UsageError
from heliostat.provenance import source_of
from heliostat.workload import refuse_shadowing

LIMIT_BYTES = 200 * 2**20
"""Largest upload; data belongs on storage that the cluster reads."""
_LEFT_OUT = ("__pycache__", "*.pyc", ".*_cache", ".git", ".venv", "venv", "node_modules", "wandb")
_IGNORE_FILES = (".gitignore", ".rayignore")
"""Ray would heed them and leave behind what was said to be sent."""
_KEYS = ("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "credentials*")
_KEYS_OF_SSH = ("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*")
_SETTINGS = (".env", ".env.*", "*.env", ".netrc", ".pypirc", ".npmrc", ".pgpass", "*kubeconfig*")
_TOKENS = ("auth_token", ".git-credentials")
_HARMLESS = ("*.py", ".env.example", "*.pub")


@dataclass(frozen=True, slots=True)
class Package:
    """Files that were gathered in one folder."""

    folder: Path
    sizes: dict[str, int]
    """Path in the folder -> bytes."""

    def describe(self) -> str:
        """Returns the size of the upload with its largest files, on one line."""
        largest = sorted(self.sizes, key=lambda name: -self.sizes[name])[:3]
        named = ", ".join(f"{name} {_readable(self.sizes[name])}" for name in largest)
        total = _readable(sum(self.sizes.values()))
        return f"uploads {total} in {len(self.sizes)} files; the largest: {named}"


def pack(
    packages: Sequence[str], extra: Sequence[Path], target: Path, *, secrets: bool = False
) -> Package:
    """Gathers packages and what else the user names.

    Args:
        packages: importable top-level names, such as those of ``packages_of``.
        extra: further files and folders, each shipped under its own name.
        target: folder to gather them in; must not exist.
        secrets: ship files that look like secrets too.

    Raises:
        UsageError: a package shadows ours or cannot be found, a file looks like a secret, or all is
            larger than ``LIMIT_BYTES``.
    """
    refuse_shadowing(Path.cwd())
    sources = {path.name: path for path in map(_source, packages)}
    for path in extra:
        if not path.exists():
            raise UsageError(f"--ship: expected a file or folder, found none at {path}")
        if path.resolve().name in sources:
            raise UsageError(f"--ship: {path} has the name of a package that is shipped; rename it")
        sources[path.resolve().name] = path.resolve()
    files = {
        f"{name}{f'/{part}' if part else ''}": path
        for name, source in sources.items()
        for part, path in _files(source)
    }
    if found := [] if secrets else sorted(name for name in files if looks_secret(name)):
        raise UsageError(
            f"{', '.join(found[:5])}: would be shipped and looks like a secret; move it out of the "
            "package, or ship it with --ship-secrets"
        )
    package = Package(target, {name: path.stat().st_size for name, path in files.items()})
    if sum(package.sizes.values()) > LIMIT_BYTES:
        raise UsageError(
            f"expected at most {_readable(LIMIT_BYTES)}, found: {package.describe()}; keep data on "
            "storage that the cluster reads"
        )
    for name, path in files.items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return package


def looks_secret(name: str) -> bool:
    """Whether a file's name is one under which secrets are kept."""
    base = Path(name).name.lower()
    return any(
        fnmatch(base, pattern) for pattern in (*_KEYS, *_KEYS_OF_SSH, *_SETTINGS, *_TOKENS)
    ) and not any(fnmatch(base, pattern) for pattern in _HARMLESS)


def _source(package: str) -> Path:
    found = source_of(package)
    if found is None:
        raise UsageError(f"no package {package!r} to ship; start from the folder that holds it")
    return found


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """Yields (name below the source, path); links that lead out of it are passed over."""
    if source.is_file():
        yield "", source
        return
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not _is_left_out(name))
        for name in sorted(names):
            path = Path(folder) / name
            inside = source.resolve() in path.resolve().parents
            if path.is_file() and inside and not _is_left_out(name):
                yield path.relative_to(source).as_posix(), path


def _is_left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*_LEFT_OUT, *_IGNORE_FILES))


def _readable(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
