"""Writes supervised traces for T1: ``python -m cluster.synthesis FILE --policy FOLDER --out OUT``.

A Ray Data pipeline: each policy attempts the questions of FILE, a verifier judges the attempts,
questions that are too easy or that nobody solved are left out, and the rest get a solution with
failures before the success. OUT is read by ``heliostat run t1 questions=OUT``. The result follows
from the questions and the seed alone, however many hosts work on it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray.data

from algorithms.t1.dataset import Question, read_file
from algorithms.t1.synthesis import (
    SOLVER,
    Attempt,
    Plan,
    chunks,
    is_hard,
    judge,
    make_writer,
    pass_rate,
    thought,
)
from algorithms.t1.verifier import GRADERS, Reason, Verifier
from heliostat.errors import UsageError
from heliostat.folder import replace_text
from heliostat.ray_session import ray_session

_CHUNK = 16
"""Questions that a policy attempts at a time."""
_CPUS = 0.25
"""Of a stage: they share the machine, one works while another waits."""
Chunk = dict[str, Any]
"""``first``: place of the first question; ``rows``: JSON of questions and attempts."""


class Attempting:
    """One policy's stage of the pipeline, built once in each of its actors."""

    def __init__(self, policy: str, number: int, plan: Plan, verifier: str) -> None:
        self._policy = policy
        self._writer = make_writer(policy, plan, number)
        self._verifier = Verifier(GRADERS[cast("Any", verifier)])

    def __call__(self, chunk: Chunk) -> Chunk:
        """Adds this policy's judged attempts to every question of the chunk."""
        rows = cast("list[dict[str, Any]]", json.loads(chunk["rows"]))
        questions = [Question(**row["question"]) for row in rows]
        texts = self._writer.write(questions, int(chunk["first"]))
        for row, found in zip(
            rows, judge(self._verifier, self._policy, questions, texts), strict=True
        ):
            row["attempts"] += [[one.policy, one.text, int(one.reason)] for one in found]
        return {"first": chunk["first"], "rows": json.dumps(rows)}


def synthesise(
    questions: Sequence[Question],
    policies: Sequence[str],
    plan: Plan,
    verifier: str = "exact",
    hosts: int = 1,
    gpus: float = 0.0,
) -> list[list[Attempt]]:
    """Returns the attempts of all policies at each question, on the Ray that is connected.

    Args:
        questions: what to attempt.
        policies: folders of Hugging Face causal models, or ``SOLVER``.
        plan: numbers of the synthesis.
        verifier: ``exact`` or ``math``.
        hosts: actors of each policy; changes no attempt.
        gpus: of each actor that runs a model.
    """
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = cast("Any", ray.data).from_items(
        [
            {
                "first": first,
                "rows": json.dumps([{"question": asdict(one), "attempts": []} for one in some]),
            }
            for first, some in chunks(questions, _CHUNK)
        ]
    )
    for number, policy in enumerate(policies):
        data = data.map(
            Attempting,
            fn_constructor_args=(policy, number, plan, verifier),
            concurrency=hosts,
            num_cpus=_CPUS,
            num_gpus=0.0 if policy == SOLVER else gpus,
        )
    done = {int(chunk["first"]): json.loads(chunk["rows"]) for chunk in data.iter_rows()}
    return [
        [Attempt(policy, text, Reason(reason)) for policy, text, reason in row["attempts"]]
        for first in sorted(done)
        for row in done[first]
    ]


def written(
    questions: Sequence[Question], attempts: Sequence[Sequence[Attempt]], plan: Plan
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """Returns the rows of the output file, and how many questions were left out and why."""
    rows: list[Mapping[str, Any]] = []
    counts = {"written": 0, "too easy": 0, "unsolved": 0}
    for place, (one, tries) in enumerate(zip(questions, attempts, strict=True)):
        if not is_hard(tries, plan):
            counts["too easy"] += 1
            continue
        made = thought(tries, plan, place)
        if made is None:
            counts["unsolved"] += 1
            continue
        counts["written"] += 1
        rows.append(
            {
                "question": one.question,
                "answer": one.answer,
                "solution": made.solution,
                "pass_rate": pass_rate(tries),
                "failures": made.failures,
            }
        )
    return rows, counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the pipeline; returns 0, 1 where nothing was written, 2 for a mistake of the user."""
    options = _parser().parse_args(arguments)
    try:
        plan = _plan(options)
        questions = read_file(options.file).questions
        if not options.out.parent.is_dir():
            raise UsageError(f"--out: expected a folder to write in, found no {options.out.parent}")
        for policy in options.policy:
            if policy != SOLVER and not (Path(policy) / "config.json").is_file():
                raise UsageError(
                    f"--policy: expected the folder of a Hugging Face model, or {SOLVER!r}, found "
                    f"no config.json in {policy!r}; give what save_pretrained wrote"
                )
        with ray_session(options.address, lambda _: None):
            attempts = synthesise(
                questions, options.policy, plan, options.verifier, options.hosts, options.gpus
            )
    except (UsageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    rows, counts = written(questions, attempts, plan)
    replace_text(options.out, "".join(json.dumps(row) + "\n" for row in rows))
    sys.stdout.write(
        f"{options.out}: {', '.join(f'{count} {name}' for name, count in counts.items())} of "
        f"{len(questions)} questions\n"
    )
    return int(not rows)


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        attempts=options.attempts,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        max_pass_rate=options.max_pass_rate,
        max_failures=options.max_failures,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.synthesis", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, help="JSONL in the form of GSM8K, MATH or AIME")
    add("--out", type=Path, required=True, help="the JSONL to write")
    add(
        "--policy",
        action="append",
        required=True,
        help=f"folder of a causal model, or {SOLVER!r} for the file's own; may be repeated",
    )
    add("--attempts", type=int, default=Plan().attempts, help="of each model at each question")
    add("--temperature", type=float, default=Plan().temperature)
    add("--max-new-tokens", type=int, default=Plan().max_new_tokens)
    add("--max-pass-rate", type=float, default=Plan().max_pass_rate, help="above it: too easy")
    add("--max-failures", type=int, default=Plan().max_failures, help="before a success")
    add("--verifier", choices=("exact", "math"), default="exact")
    add("--hosts", type=int, default=1, help="actors of each policy; changes no result")
    add("--gpus", type=float, default=0.0, help="of each actor that runs a model")
    add("--seed", type=int, default=Plan().seed)
    add("--address", help="of a Ray cluster; none starts a local one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
