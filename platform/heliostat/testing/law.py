"""What a broken contract says."""

from __future__ import annotations

from heliostat.errors import HeliostatError


class ContractBroken(HeliostatError, AssertionError):
    """A role, an environment or a workload breaks a law that the platform builds on."""


def demand(broken: str | None, law: str, cause: str) -> None:
    """Raises where a law is broken.

    Args:
        broken: what was found; None where the law is kept.
        law: what holds for all.
        cause: what most often breaks it, and what to do.

    Raises:
        ContractBroken: carries all three.
    """
    if broken is not None:
        raise ContractBroken(f"law: {law}\nfound: {broken}\nlikely cause: {cause}")
