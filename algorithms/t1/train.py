"""T1 (arXiv 2501.11651): supervised trial and error, then RL from verified answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from algorithms.t1.ahead import Ahead
from algorithms.t1.batches import Batch
from algorithms.t1.evaluate import Examiner, gains, log_samples
from algorithms.t1.lora import merging, with_adapters
from algorithms.t1.model import TokenScorer, optimizers
from algorithms.t1.penalties import FalseClaims
from algorithms.t1.roles import Problems
from algorithms.t1.tasks import make_policy, make_task
from algorithms.t1.updates import move_anchor, policy_update, supervised_step
from algorithms.t1.workload import T1Recipe
from heliostat import Run
from heliostat.actors.data import Stream
from heliostat.errors import UsageError
from heliostat.learner import full_state, load_full_state


def train(run: Run[T1Recipe]) -> Mapping[str, float]:
    """Trains one policy and returns its held-out scores before (``sft_``) and after RL."""
    recipe, task = run.recipe, make_task(run.recipe)
    cold_start = optimizers(recipe.optimizer, recipe.sft_lr, recipe.sft_muon_lr, 0.1)
    reinforcement = optimizers(recipe.optimizer, recipe.lr, recipe.muon_lr, 0.0)
    model = TokenScorer(with_adapters(make_policy(recipe, task), recipe))
    anchor = run.frozen(model)
    policy = run.learner(model, cold_start, merging(recipe))
    seed = run.seed("problems")
    problems = Stream(run.pool(Problems), Problems, seed, task.fingerprint)
    ahead, examiner, claims = Ahead(run, problems), Examiner(run), FalseClaims()
    step = 0

    def state() -> dict[str, Any]:
        examiner.collect(wait=True)
        return {
            "step": step,
            "sft_steps": recipe.sft_steps,
            "policy": policy.state(),
            "anchor": full_state(anchor),
            "ahead": ahead.state(),
            "problems": problems.state(),
            "scores": examiner.scores,
            "claims": claims.state(),
        }

    if saved := run.restore():
        step = saved["step"]
        if step > max(recipe.total_steps, 0) or (
            saved["sft_steps"] != recipe.sft_steps
            and step > min(saved["sft_steps"], recipe.sft_steps)
        ):
            raise UsageError(
                f"the checkpoint of step {step} is of a run with sft_steps={saved['sft_steps']}; "
                f"it does not lie on the way of sft_steps={recipe.sft_steps}, steps={recipe.steps}"
            )
        if step > recipe.sft_steps:
            policy.restart(reinforcement)
        policy.load(saved["policy"])
        load_full_state(anchor, saved["anchor"])
        problems.load(saved["problems"])
        ahead.load(saved["ahead"])
        examiner.scores = saved["scores"]
        claims.load(saved["claims"])

    # Section 2: the cold start on traces of failures, checks and a success.
    while step < recipe.sft_steps:
        rows = problems.next(recipe.sft_batch)[run.rank :: run.world]
        traces = task.traces(rows, run.seed("traces", step, run.rank))
        metrics = supervised_step(run, policy, traces, step)
        step += 1
        run.report(step, metrics, state)

    if step == recipe.sft_steps:
        examiner.test(policy.weights(step), "sft_")
        move_anchor(policy, anchor, decay=0.0)
        policy.restart(reinforcement)

    # Section 3: K answers a prompt, r' and k centred over the others, one step, a moving anchor.
    while step < recipe.total_steps:
        update = step - recipe.sft_steps
        waiting = ahead.num_ready
        with run.phase("sample"):
            batch = Batch.of(ahead.next(policy.weights(step), update))
        with run.phase("learn"):
            metrics = claims.watch(run, policy_update(run, policy, anchor, batch, update))
        metrics |= {"lag/versions": step - batch.version, "perf/queue_depth": waiting}
        step += 1
        if (update + 1) % recipe.eval_every == 0:
            examiner.validate(policy.weights(step), update + 1)
            log_samples(run, task, batch, step)
        run.report(step, metrics, state)

    examiner.collect(wait=True)
    examiner.test(policy.weights(step), "")
    return gains(examiner.scores)
