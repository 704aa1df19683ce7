"""Computer algebra for the verifier's workers; importing it takes seconds and needs ``[math]``."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

_LIBRARY: Any = importlib.import_module("math_verify")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it may run for ever


def prepare(gold: str) -> Callable[[str], bool] | None:
    """Reads a gold value; the judge then compares expressions, sets, intervals and matrices.

    Not symmetric: it is the answer that is compared with the gold value. Units and degree signs
    are dropped, ``10%`` equals both 0.1 and 10, and floats are rounded to six digits.
    """
    known = _parsed(gold)
    if not known:
        return None
    return lambda answer: _LIBRARY.verify(
        known, _parsed(answer), timeout_seconds=None, raise_on_error=True
    )


def _parsed(text: str) -> list[Any]:
    formula = f"${text.replace('$', '')}$"
    found = _LIBRARY.parse(formula, parsing_timeout=None, raise_on_error=True)
    return [value for value in found if not isinstance(value, str)]


_parsed(r"\frac{1}{2}")  # builds the parser's tables once, before workers are forked
