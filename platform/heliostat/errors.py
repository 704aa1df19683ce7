"""The exceptions of the platform: each also inherits a standard type and survives pickling."""

import difflib


class HeliostatError(Exception):
    """Root of every error that the platform raises on purpose."""


class UsageError(HeliostatError, ValueError):
    """The user's mistake: a bad key, value, file or layout. Commands exit with status 2."""


class DeadlineExceeded(HeliostatError, TimeoutError):
    """A wait ran past its deadline; the message says what it waited for and for how long."""


class RoleFailed(HeliostatError, RuntimeError):
    """A role's own method raised; the message carries role, member, node and its traceback."""


class ActorLost(HeliostatError, RuntimeError):
    """A host actor died and its call could not be repeated."""


class RunFailed(HeliostatError, RuntimeError):
    """A run ended without a result. Commands exit with status 1."""


class MethodFailed(RunFailed):
    """The method itself raised; another attempt would meet the same fault."""


class WeightsDiffer(HeliostatError, RuntimeError):
    """A model does not hold the weights that it should; the message gives both digests."""


class CheckpointCorrupt(HeliostatError, OSError):
    """A checkpoint folder lacks its marker, or its files differ from what the marker promises."""


class Stopped(HeliostatError):
    """Raised inside ``train`` after a stop was asked for and the state was saved."""


def nearest(name: str, known: list[str], what: str = "key") -> str:
    """Returns a message that refuses ``name`` and offers the nearest of the ``known`` ones."""

    def likeness(key: str) -> float:
        pairs = ((name, key), (name.rpartition(".")[2], key.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    best = max(known, key=likeness, default=None)
    if best is None or likeness(best) < 0.6:
        return f"unknown {what} {name!r}; expected one of: {', '.join(known)}"
    return f"unknown {what} {name!r}; did you mean {best!r}?"
