"""Graders that misbehave; the worker processes of the verifier's tests import them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def moody(gold: str) -> Callable[[str], bool] | None:
    """Reads golds that say how it should behave; right is what equals the gold value."""
    if gold == "unreadable":
        return None
    _act(gold)

    def judge(answer: str) -> bool:
        if answer.startswith("die once "):
            mark = Path(answer.removeprefix("die once "))
            if not mark.exists():
                mark.touch()
                _act("die")
            return True
        _act(answer)
        time.sleep(0.01)
        return answer == gold

    return judge


def _act(word: str) -> None:
    match word:
        case "sleep":
            time.sleep(3600)
        case "loop":
            while True:
                pass
        case "memory":
            bytearray(2**34)
        case "raise":
            raise RuntimeError(word)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            pass
