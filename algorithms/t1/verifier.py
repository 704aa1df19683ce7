"""What a verifier says of an answer."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why an answer got its score; fits an uint8."""

    OK = 0
    """Right: score 1."""
    WRONG = 1
    """An answer, but not the right one: score 0."""
    NO_ANSWER = 2
    """Ended without an answer, or did not end: score 0."""
    GOLD_UNPARSED = 3
    """The data set's own answer could not be read: no score, which is not the policy's fault."""
    TIMEOUT = 4
    """Judging it would cost more time or memory than is allowed: score 0."""
    ERROR = 5
    """The verifier failed: no score."""

    @property
    def score(self) -> int | None:
        """1, 0, or None where the answer must teach nothing."""
        if self in (Reason.GOLD_UNPARSED, Reason.ERROR):
            return None
        return int(self is Reason.OK)
