r"""Finds the final answer in a text and compares answers exactly, in time linear in their length.

An answer is what the last ``####`` or ``\boxed{}`` holds: a trace that corrects itself is judged
by where it ends.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST_ANSWER = 512
"""Characters of the longest answer that is worth judging; a longer one is refused unread."""

_MARKS = re.compile(r"####[^\n]*|\\d?fbox\s*\{|\\boxed\s*\{|\\boxed\s+[^\s{}$]+|\\.|[{}]")
_DIGITS = r"(?:\d{1,3}(?:\{?,\}?\\?!?\d{3}){1,12}|\d{1,40})"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d{{0,40}})?|\.\d{{1,40}})"
_NUMBER = re.compile(
    rf"([+-]?)(?:({_DECIMAL})(?:/(\d{{1,40}})|[eE]([+-]?\d{{1,2}}))?"
    r"|\\[dt]?frac\{([+-]?\d{1,40})\}\{(\d{1,40})\}|\\[dt]?frac(\d)(\d))"
)
_WORDS = re.compile(r"(?i:yes|no|odd)|[^\W\d_]{4,}(?:[ '-][^\W\d_]+)*|\(?[A-J]\)?")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_COMMAS = re.compile(r"\{?,\}?(?:\\!)?")


def final_value(text: str) -> str | None:
    r"""Returns what the last ``####`` line or closed ``\boxed{}`` holds, None without one.

    Braces are balanced, escaped ones do not count, and of nested boxes the inner one counts. A
    box that is never closed is no box.
    """
    last, value = -1, ""
    open_braces: list[tuple[int, int]] = []  # (start of the box or -1, start of what it holds)
    for mark in _MARKS.finditer(text):
        word = mark.group()
        if word.startswith("####"):
            found, held = mark.start(), word[4:]
            if (box := held.find("\\boxed")) >= 0 or (box := held.find("\\fbox")) >= 0:
                held = final_value(held[box:]) or held
        elif word == "}" and open_braces:
            found, start = open_braces.pop()
            held = text[start : mark.start()]
        elif word.endswith("{") and word != "\\{":
            open_braces.append((-1 if word == "{" else mark.start(), mark.end()))
            continue
        elif word.startswith("\\boxed"):
            found, held = mark.start(), word[6:]
        else:
            continue
        if found > last and held.strip():
            last, value = found, held.strip()
    return value or None


def same_value(given: str, gold: str) -> bool | None:
    """Whether two values are equal: as exact numbers or as texts; None where that cannot tell.

    It can tell for two numbers, for equal texts, and where the gold value is plain words.
    """
    numbers = number(given), number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if plain(given) == plain(gold):
        return True
    return False if is_readable(gold) and number(gold) is None else None


def number(text: str) -> Fraction | None:
    r"""Returns the exact number that a text is, None where it is none.

    Reads integers, decimals, ``a/b``, ``\frac{a}{b}``, ``1,000``, ``1{,}000``, ``1.5e3`` and a
    leading currency sign. Longer numbers than 40 digits are texts: reading them must not cost
    memory or time.
    """
    bare = plain(text).replace("\\$", "").replace("$", "").strip()
    found = _NUMBER.fullmatch(bare)
    if not found:
        return None
    sign, decimal, below, power, *fraction = found.groups()
    if decimal is None:
        above, below = (part for part in fraction if part is not None)
    else:
        above = _COMMAS.sub("", decimal)
    if below is not None and not int(below):
        return None
    value = Fraction(above) / int(below or 1) * Fraction(10) ** int(power or 0)
    return -value if sign == "-" else value


def is_readable(gold: str) -> bool:
    """Whether a gold value can be compared without computer algebra: a number or plain words.

    Words are of four letters or more: ``xy`` may be a product.
    """
    return (
        number(gold) is not None
        or _TEXT.fullmatch(gold.strip().strip("$")) is not None
        or _WORDS.fullmatch(plain(gold, fold=False)) is not None
    )


def plain(text: str, fold: bool = True) -> str:
    r"""Returns a value without ``$``, ``\text{}``, a full stop, spare spaces and, if folded, case.

    A currency sign (a ``$`` on the left only) stays.
    """
    bare = _TEXT.sub(r"\1", text.strip()).rstrip(".").strip()
    if len(bare) > 1 and bare[0] == bare[-1] == "$":
        bare = bare.strip("$")
    joined = " ".join(bare.split())
    return joined.casefold() if fold else joined
