"""Looks at a finished or stopped run's policies: the best temperature, the worth of thinking.

``python -m algorithms.t1.probe temperature RUN_FOLDER`` chooses the sampling temperature without
labels; ``python -m algorithms.t1.probe thinking RUN_FOLDER`` measures accuracy over budgets of
thought at several of its checkpoints. Both print one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import Sampling
from algorithms.t1.scaling import Curve, Summarising, scaling_curve
from algorithms.t1.tasks import Row, Split, Task, held_out, make_policy, make_task, to_tensors
from algorithms.t1.turn import ADAPTATION, GRID, mean_entropy, turning_point
from algorithms.t1.workload import T1Recipe
from heliostat import checkpoint
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.seeding import derive, torch_generator


@dataclass(frozen=True, slots=True)
class Policy:
    """The model of one checkpoint, with what it was trained on."""

    recipe: T1Recipe
    task: Task
    scorer: TokenScorer
    step: int

    @classmethod
    def of(cls, folder: RunFolder, step: int | None = None) -> Policy:
        """Loads a checkpoint; None takes the newest.

        Raises:
            UsageError: the folder holds no recipe, or no such checkpoint; lists those there are.
        """
        steps = checkpoint.steps(folder.checkpoints)
        wanted = steps[-1] if step is None and steps else step
        if wanted not in steps or not folder.recipe.is_file():
            raise UsageError(
                f"expected a run of t1 with a checkpoint of step {step or 'any'} in "
                f"{str(folder.path)!r}, found a recipe: {folder.recipe.is_file()}, checkpoints of "
                f"steps {steps}; give a run's folder and one of its steps"
            )
        recipe = T1Recipe.from_dict(yaml.safe_load(folder.recipe.read_text()))
        found, state = checkpoint.load(checkpoint.path_of(folder.checkpoints, wanted))
        task = make_task(recipe)
        scorer = TokenScorer(make_policy(recipe, task))
        scorer.load_state_dict(state["policy"]["model"])
        return cls(recipe, task, scorer.eval(), found)

    def rows(self, split: Split, count: int) -> list[Row]:
        """Returns the same ``count`` held-out problems as ``Problems.held_out``."""
        return held_out(self.task, split, count)

    def sampling(self, temperature: float, copies: int = 1) -> Sampling:
        """Returns how the policy samples to its recipe's limit."""
        end, limit = self.task.end_token, self.recipe.max_new_tokens
        return Sampling(copies, limit, end, temperature=temperature)


def entropy_curve(policy: Policy, prompts: int, grid: Sequence[float] = GRID) -> list[float]:
    """Returns H(T) in nats at each temperature, from one answer to each validation prompt."""
    tokens, real = to_tensors(policy.task.prompts(policy.rows("validation", prompts)))
    return [
        mean_entropy(
            policy.scorer,
            tokens,
            real,
            policy.sampling(temperature),
            torch_generator(policy.recipe.seed, "turn", str(temperature)),
        )
        for temperature in grid
    ]


def thinking_curve(
    policy: Policy, summariser: Policy, budgets: Sequence[int], prompts: int, copies: int = 1
) -> Curve:
    """Returns accuracy on test prompts over budgets of thought, at temperature 1.

    Raises:
        UsageError: the task cannot turn a cut-off thought into an answer.
    """
    task = policy.task
    if not isinstance(task, Summarising):
        raise UsageError(
            f"expected a task with cue, answer_tokens and commit, found {type(task).__name__}; "
            "add them to it"
        )
    return scaling_curve(
        task,
        policy.rows("test", prompts),
        (policy.scorer.policy, summariser.scorer.policy),
        policy.sampling(1.0, copies),
        budgets,
        derive(policy.recipe.seed, "thinking"),
    )


def _temperature(options: argparse.Namespace) -> dict[str, object]:
    policy = Policy.of(RunFolder(options.run), options.step)
    entropies = entropy_curve(policy, options.prompts)
    entp = turning_point(GRID, entropies)
    return {
        "step": policy.step,
        "entp": entp,
        "temperature": {name: round(entp + more, 3) for name, more in ADAPTATION.items()},
        "entropies": dict(zip(map(str, GRID), entropies, strict=True)),
    }


def _thinking(options: argparse.Namespace) -> dict[str, object]:
    folder = RunFolder(options.run)
    summariser = Policy.of(folder, options.summariser)
    longest = summariser.recipe.max_new_tokens
    budgets = sorted({longest * part // 8 for part in range(9)})
    steps = [step for step in checkpoint.steps(folder.checkpoints) if step >= summariser.step]
    return {
        str(step): asdict(
            thinking_curve(Policy.of(folder, step), summariser, budgets, options.prompts)
        )
        for step in steps
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    temperature = commands.add_parser("temperature", help="choose one without labels (TURN)")
    temperature.set_defaults(command=_temperature)
    temperature.add_argument("--step", type=int, help="checkpoint; the newest by default")
    thinking = commands.add_parser("thinking", help="measure accuracy over budgets of thought")
    thinking.set_defaults(command=_thinking)
    thinking.add_argument(
        "--summariser", type=int, required=True, help="step of the last supervised checkpoint"
    )
    for added in (temperature, thinking):
        added.add_argument("run", type=Path, help="the run's folder")
        added.add_argument("--prompts", type=int, default=512)
    options = parser.parse_args(arguments)
    sys.stdout.write(json.dumps(options.command(options), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
