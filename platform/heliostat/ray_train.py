"""The learner's ranks under Ray Train V2.

Ray Train starts the ranks, builds their process group and notices deaths. Its own ``report`` is
not used: it drops metrics that come without a checkpoint, waits for a poll of the controller, and
forgets a checkpoint whose rank dies right after it. Metrics go to the tracker and checkpoints to
the run folder directly; a death ends ``fit`` and the launcher starts the next attempt, which also
covers the death of Ray Train's controller.
"""

from __future__ import annotations

import os
import traceback
from typing import Any, cast

import ray
import torch
from ray import train
from ray.exceptions import RayActorError
from ray.train.torch import TorchTrainer, get_device

from heliostat.errors import ActorLost, MethodFailed, RunFailed, Stopped
from heliostat.layout import Layout
from heliostat.rank import Death, train_rank
from heliostat.run import Assignment

_POLL_S = "0.5"
_START_TRIES = 2


def fit(assignment: Assignment) -> None:
    """Trains on the layout's ranks until they return.

    Raises:
        Stopped: the run was asked to save and leave, and did.
        MethodFailed: the method raised.
        RunFailed: the ranks could not start by the deadline.
        Death: a rank or the controller died.
    """
    layout = assignment.recipe.layout
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _POLL_S)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(layout.start_deadline_s)
    trainer = TorchTrainer(
        _rank,
        train_loop_config={"assignment": assignment},
        scaling_config=_scaling(layout),
        run_config=train.RunConfig(
            name=f"attempt-{assignment.attempt}",
            storage_path=str(assignment.folder.path / ".ray_train"),
            failure_config=train.FailureConfig(
                max_failures=0, controller_failure_limit=_START_TRIES
            ),
            logging_config=train.LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}},
        ),
    )
    try:
        trainer.fit()
    except train.WorkerGroupError as error:
        for failure in error.worker_failures.values():
            if isinstance(failure, MethodFailed):
                raise failure from None
        raise Death(f"a learner rank died: {error}") from error
    except train.ControllerError as error:
        raise RunFailed(f"the learner's ranks could not start: {error}") from error
    except RayActorError as error:
        raise Death(f"Ray Train's controller died: {error}") from error
    if assignment.folder.stop.exists() and not assignment.folder.result.exists():
        raise Stopped("the learner saved its checkpoint and left")


def _scaling(layout: Layout) -> train.ScalingConfig:
    ranks: Any = layout.learners
    if layout.min_learners is not None and layout.min_learners < layout.learners:
        ranks = (layout.min_learners, layout.learners)
    return train.ScalingConfig(
        num_workers=ranks,
        elastic_resize_monitor_interval_s=layout.resize_every_s,
        use_gpu=layout.learner_gpus > 0,
        resources_per_worker={"CPU": layout.learner_cpus, "GPU": layout.learner_gpus},
    )


def _rank(config: dict[str, Any]) -> None:
    assignment = cast("Assignment", config["assignment"])
    torch.set_num_threads(max(1, int(assignment.recipe.layout.learner_cpus)))
    context = train.get_context()
    device = get_device()
    try:
        train_rank(assignment, context.get_world_rank(), context.get_world_size(), device)
    except Stopped:
        return  # the run folder says so to the launcher
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, ActorLost) or _lost_peer(error):
            raise Death(text) from error
        raise MethodFailed(f"the method raised {type(error).__name__}: {error}\n{text}") from error


def _lost_peer(cause: Exception) -> bool:
    """Whether a collective failed because another rank died: gloo has no error type of its own."""
    gloo = isinstance(cause, RuntimeError) and "gloo" in str(cause).lower()
    return gloo or isinstance(cause, torch.distributed.DistError)
