"""T1's actors: problems (data), samplers (environment) and solvers (evaluation).

Each plugs a task, a policy and a scorer into one of the shared families; a prompt is an
environment of one step whose action is an answer and whose reward is its grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from algorithms.t1.aggregate import Voting, best_of_n, majority, pass_at_k
from algorithms.t1.engines import make_engine
from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import NEVER, Answers, Finish, Pause, Sampling
from algorithms.t1.tasks import Row, Split, Task, held_out, make_policy, make_task, to_tensors
from algorithms.t1.turn import mean_entropy
from algorithms.t1.workload import T1Recipe
from heliostat import Member, Weights, idempotent
from heliostat.actors.data import Reader, share
from heliostat.actors.environment import EnvironmentActor, Episodes, Job, Step, play
from heliostat.actors.evaluation import EvaluationActor, Score
from heliostat.seeding import torch_generator


class Problems(Reader[Row]):
    """Training problems in shares, held-out ones on request."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        self._task = make_task(recipe)
        rows = self._task.rows("train")
        mine = share(len(rows), member)
        super().__init__(rows[mine.start : mine.stop])

    @idempotent
    def held_out(self, split: Split, count: int) -> list[Row]:
        """Returns ``count`` problems of a split, or all where it has fewer; the same in any run."""
        return held_out(self._task, split, count)


class Answering:
    """The environment: prompts are observations, graded answers end the episode."""

    def __init__(self, task: Task, votes: bool = False) -> None:
        self._task = task
        self._voting = task if votes and isinstance(task, Voting) else None
        self._rows: Sequence[Row] = ()
        self._prompts = np.empty(0)

    def reset(self, task: Sequence[Row], seed: int) -> np.ndarray:
        """Returns the prompts of the rows, int64 [P, S]."""
        del seed
        self._rows = task
        self._prompts = self._task.prompts(task)
        return self._prompts

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Grades answers [P, K, L]; rewards are [P, K], and every episode is done.

        Where an answer waits to go on nothing is graded yet, and all rewards are 0.
        """
        if is_aborted(actions):
            nothing = np.zeros(actions["lengths"].shape, np.float32)
            return Step(self._prompts, nothing, np.ones_like(nothing, dtype=bool), {})
        grades = self._task.grade(self._rows, actions["action"], actions["lengths"])
        info: dict[str, np.ndarray] = {
            "false_claims": grades.false_claims,
            "repetitive": grades.repetitive,
            "graded": grades.graded,
            "reasons": grades.reasons,
        }
        if self._voting is not None:
            info |= {"votes": self._voting.votes(actions["action"], actions["lengths"])}
        done = np.ones_like(grades.solved)
        return Step(self._prompts, grades.solved.astype(np.float32), done, info)


class Answerer:
    """The policy: samples K answers to each prompt."""

    def __init__(self, recipe: T1Recipe, task: Task, sampling: Sampling) -> None:
        self.sampling = sampling
        self._engine = make_engine(recipe, lambda: make_policy(recipe, task))
        self._key = ""
        self._version = -1

    def load(self, weights: Weights) -> None:
        """Copies new weights into the model; those it has already cost nothing."""
        if weights.key != self._key:
            self._key = ""  # a load that fails leaves the model between two versions
            self._engine.load(weights)
            self._key = weights.key
        self._version = weights.version

    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Returns whole answers; see ``answer``."""
        return self.answer(observations, generator, None, NEVER)

    def answer(
        self,
        observations: np.ndarray,
        generator: torch.Generator,
        begun: Episodes | None,
        pause: Pause,
    ) -> dict[str, np.ndarray]:
        """Answers prompts [P, S] anew, or goes on with what earlier calls wrote.

        Returns:
            ``action`` int64, ``log_probs`` float32 as ``Answers.log_probs`` and ``versions`` int32,
            the version of the weights that drew each token, all [P, K, L], L the longest answer of
            the batch; ``lengths`` int64, ``finish`` int64 and ``finished`` bool are [P, K].
        """
        prompts, real = to_tensors(observations)
        shape = (len(observations), self.sampling.answers_per_prompt)
        before = None if begun is None else _answers_of(begun)
        mask = None if bool(real.all()) else real
        made = self._engine.sample(prompts, self.sampling, generator, mask, before, pause)
        versions = np.full(made.tokens.shape, self._version, np.int32)
        if begun is not None:
            older = begun["versions"][0].reshape(len(versions), -1)
            places = np.arange(older.shape[1], dtype=np.int64)
            kept = np.less(places, begun["lengths"][0].reshape(-1, 1))
            np.copyto(versions[:, : older.shape[1]], older, where=kept)
        return {
            "action": made.tokens.numpy().reshape(*shape, -1),
            "log_probs": made.log_probs.numpy().reshape(*shape, -1),
            "versions": versions.reshape(*shape, -1),
            "lengths": made.lengths.numpy().reshape(shape),
            "finish": made.finish.numpy().reshape(shape),
            "finished": made.finished.numpy().reshape(shape),
        }


def is_aborted(fields: Mapping[str, np.ndarray]) -> bool:
    """Whether some answer waits to go on."""
    return "finish" in fields and bool((fields["finish"] == Finish.ABORTED).any())


def _answers_of(begun: Episodes) -> Answers:
    """Rebuilds what an earlier call returned, N = P * K rows."""
    given = (begun[name][0] for name in ("action", "log_probs", "lengths", "finish"))
    tokens, log_probs, lengths, finish = map(torch.tensor, given)
    rows = lengths.numel()
    return Answers(
        tokens.reshape(rows, -1), log_probs.reshape(rows, -1), lengths.flatten(), finish.flatten()
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """One call to a sampler: prompts, and what earlier calls have written of their answers."""

    job: Job
    begun: Episodes | None = None
    pause: Pause = NEVER


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The policy of one ask."""

    answerer: Answerer
    ask: Ask

    def load(self, weights: Weights) -> None:
        self.answerer.load(weights)

    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        return self.answerer.answer(observations, generator, self.ask.begun, self.ask.pause)


class Samplers(EnvironmentActor):
    """Samples and grades training answers."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        task = make_task(recipe)
        self._answering = Answering(task)
        self._answerer = Answerer(recipe, task, _sampling(recipe, task))
        super().__init__(self._answering, self._answerer)

    @idempotent
    def answer(self, ask: Ask, weights: Weights) -> Episodes:
        """Answers the job's prompts, or goes on; graded once every answer has ended."""
        return play(self._answering, _Resumed(self._answerer, ask), ask.job, weights)


class Solvers(EvaluationActor):
    """Scores weights on held-out problems."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        task = make_task(recipe)
        self._answerer = Answerer(recipe, task, replace(_sampling(recipe, task), min_p=0.0))
        self._recipe, self._task = recipe, task
        self._own: TokenScorer | None = None
        super().__init__(Answering(task, votes=True), self._answerer, score_answers)

    @idempotent
    def solve(self, job: Job, weights: Weights, temperature: float, answers: int) -> Score:
        """Samples ``answers`` answers to each prompt of the job at a temperature."""
        self._answerer.sampling = replace(
            self._answerer.sampling, temperature=temperature, answers_per_prompt=answers
        )
        return self.score(job, weights)

    @idempotent
    def entropy(self, probe: tuple[Job, float], weights: Weights) -> Score:
        """Samples an answer to each prompt of the job at a temperature; scores its entropy."""
        job, temperature = probe
        if self._own is None:  # a model of its own, as not every engine scores
            self._own = TokenScorer(make_policy(self._recipe, self._task)).eval()
        weights.load_into(self._own)
        sampling = replace(self._answerer.sampling, temperature=temperature, answers_per_prompt=1)
        prompts, generator = to_tensors(self._task.prompts(job.task)), torch_generator(job.seed)
        entropy = mean_entropy(self._own, *prompts, sampling, generator)
        return Score(weights.version, len(job.task), {"entropy": entropy}, weights.key)


def score_answers(episodes: Episodes) -> dict[str, float]:
    """Returns means over answers, and over prompts where several answers count together.

    ``pass_at_k`` is that some of the K answers is right, ``pass_at_2``, ``pass_at_4``... the same
    of that many drawn from them; ``majority`` is the most frequent final answer, ``best_of_n`` the
    finished answer of the highest mean log-probability: neither sees a label. Prompts with an
    answer that could not be graded are left out, unless all are.
    """
    graded = episodes.fields.get("graded", episodes["reward"] >= 0)[0]
    whole = graded.all(axis=1)
    if whole.any() and not whole.all():
        kept = {name: value[:, whole] for name, value in episodes.fields.items()}
        return score_answers(replace(episodes, fields=kept)) | {
            "ungraded": float(1 - graded.mean())
        }
    solved = episodes["reward"][0] > 0
    finished, lengths = episodes["finished"][0], episodes["lengths"][0]
    likelihood = episodes["log_probs"][0].sum(axis=2, dtype=np.float64) / lengths
    copies = solved.shape[1]
    votes = episodes.fields.get("votes")
    return {
        "accuracy": float(solved.mean()),
        "pass_at_k": float(solved.any(axis=1).mean()),
        **{f"pass_at_{k}": pass_at_k(solved, k) for k in (2, 4, 8, 16, 32, 64) if k < copies},
        **({} if votes is None else {"majority": majority(solved, votes[0])}),
        "best_of_n": best_of_n(solved, np.where(finished, likelihood, -np.inf), copies),
        "false_claims": float(episodes["false_claims"].mean()),
        "overlong": float(1 - finished.mean()),
        "length": float(lengths.mean()),
        "ungraded": float(1 - graded.mean()),
    }


def _sampling(recipe: T1Recipe, task: Task) -> Sampling:
    return Sampling(
        answers_per_prompt=recipe.answers_per_prompt,
        max_new_tokens=recipe.max_new_tokens,
        end_token=task.end_token,
        temperature=recipe.temperature,
        min_p=recipe.min_p,
    )
