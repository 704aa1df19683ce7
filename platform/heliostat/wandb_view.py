"""A run in Weights & Biases: its rows, media, summary and, where asked, its checkpoints."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np
import numpy.typing as npt

from heliostat.errors import UsageError
from heliostat.privacy import public_config
from heliostat.recipe import Tracking, WandbMode
from heliostat.tracker import Cell, Number, histogram, read_metrics
from heliostat.views import RunLabels

if TYPE_CHECKING:
    import wandb

UPLOAD_BYTES = 256 * 2**20
"""Checkpoints up to this size are uploaded; W&B keeps references to the files of a larger one."""
logger = logging.getLogger("heliostat")


class WandbView:
    """Logs to Weights & Biases: into ``<folder>/wandb`` unless the mode is ``online``.

    All attempts of a run share its id. Rows are kept in the order of logging and carry ``step``,
    the x-axis of every chart, and ``attempt``, which grows with each process that opened the run.
    W&B cannot take rows back, so ``rewind`` leaves the rows of the attempt that died: where a chart
    shows a step twice, the higher attempt counts. ``heliostat wandb-sync`` uploads what was logged
    offline, all attempts in order.

    The summary holds the last value of every metric and, as ``best/<score>``, the best score of
    the rows that stand.

    A checkpoint is a version of the artifact ``checkpoint-<run id>`` with the alias ``step-<n>``,
    and ``best`` while it is that. References lead into the run's URL or, ``file://``, its folder,
    and nowhere once the run has deleted the checkpoint; ``keep_checkpoints`` says how many stay.

    A server that cannot be reached within ten seconds, or refuses, makes the run an offline one.
    Neither code, git state, command line, host name, package list nor console is recorded.
    """

    def __init__(self, folder: Path, labels: RunLabels, tracking: Tracking) -> None:
        """Opens the run."""
        # Reports of W&B's own faults hold paths, and hang for a minute where nothing answers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._folder = folder
        self._labels = labels
        self._artifacts = tracking.artifacts
        self._newest: tuple[Path, int] | None = None
        self._best = -float("inf")
        self._attempt = 1 + len(list(folder.glob(f"wandb/*run-*-{labels.run_id}")))
        folder.mkdir(parents=True, exist_ok=True)
        mode = wandb_mode(tracking)
        try:
            self._run = _start(folder, labels, tracking, mode)
            refused = "nobody logged in" if mode == "online" and self._run.disabled else None
        except wandb.Error as error:
            if mode != "online":
                raise
            refused = str(error)
        if refused:
            logger.warning("W&B is not reachable, logging offline instead: %s", refused)
            wandb.teardown()  # the failed start still holds the run's id
            self._run = _start(folder, labels, tracking, "offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Hands one row to W&B's own process."""
        # W&B drops rows whose own step does not grow, so it counts rows and ``step`` is a column.
        self._run.log({**metrics, "step": step, "attempt": self._attempt})
        self._keep_best([metrics])

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Logs the rows as one ``wandb.Table``."""
        import wandb

        table = wandb.Table(columns=list(columns), data=list(rows), allow_mixed_types=True)
        with self._staging():
            self._log_media(name, table, step)

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Logs 64 bins as ``wandb.Histogram``."""
        import wandb

        counts, edges = histogram(values)
        drawn = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
        self._log_media(name, drawn, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """Logs the file as ``wandb.Image`` or ``wandb.Video``."""
        import wandb

        kind = wandb.Video if path.suffix == ".gif" else wandb.Image
        self._log_media(name, kind(str(path)), step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Makes the checkpoint an artifact where it is one that was asked for."""
        self._newest = path, step
        if self._artifacts in {"all", "best"}:
            from heliostat.checkpoint import best

            is_best = best(path.parent) == path
            if is_best or self._artifacts == "all":
                self._publish(path, step, ["best"] if is_best else [])

    def rewind(self, step: int) -> None:  # noqa: ARG002 - the folder has forgotten already
        """Takes the best score anew from the rows that stand.

        The next rows say by ``attempt`` that they replace the former.
        """
        self._best = -float("inf")
        self._keep_best(read_metrics(self._folder))

    def finish(self, exit_code: int = 0) -> None:
        """Uploads what is pending, within half a minute, or three seconds where the run failed.

        What is not uploaded by then waits on the disk for ``wandb sync --include-online``.

        Raises:
            TimeoutError: the run failed and its end is still being uploaded.
        """
        done: Future[None] = Future()

        def finish() -> None:
            try:
                if self._artifacts == "last" and self._newest:
                    self._publish(*self._newest, [])
                done.set_result(self._run.finish(exit_code))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                done.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        done.result(timeout=3.0 if exit_code else None)

    def _log_media(self, name: str, drawn: object, step: int) -> None:
        self._run.log({name: drawn, "step": step, "attempt": self._attempt})

    def _keep_best(self, rows: Sequence[Mapping[str, Number]]) -> None:
        score = self._labels.score
        values = [float(row[score]) for row in rows if score in row] if score else []
        better = [value for value in values if value > self._best]
        if better:
            self._best = max(better)
            self._run.summary[f"best/{score}"] = self._best

    def _publish(self, path: Path, step: int, aliases: Sequence[str]) -> None:
        import wandb

        artifact = wandb.Artifact(
            f"checkpoint-{self._labels.run_id}", type="checkpoint", metadata={"step": step}
        )
        files = sorted(file for file in path.iterdir() if file.is_file())
        large = sum(file.stat().st_size for file in files) > UPLOAD_BYTES
        with self._staging():
            for file in files:
                if large and self._labels.url:  # which the mirror may not have reached yet
                    uri = f"{self._labels.url}/{file.relative_to(self._folder)}"
                    artifact.add_reference(uri, name=file.name, checksum=False)
                elif large:
                    artifact.add_reference(file.as_uri(), name=file.name)
                else:
                    artifact.add_file(str(file), name=file.name)
            self._run.log_artifact(artifact, aliases=["latest", f"step-{step}", *aliases])

    @contextmanager
    def _staging(self) -> Generator[None]:
        """Keeps with the run what a later upload needs: W&B has a variable for it, no argument."""
        name = "WANDB_DATA_DIR"
        if name in os.environ:
            yield
            return
        os.environ[name] = str(self._folder / "wandb" / "staging")
        try:
            yield
        finally:
            del os.environ[name]


def _start(folder: Path, labels: RunLabels, tracking: Tracking, mode: WandbMode) -> wandb.Run:
    import wandb

    return wandb.init(
        dir=folder,
        mode=mode,
        project=tracking.project or os.environ.get("WANDB_PROJECT") or "heliostat",
        id=labels.run_id,
        name=labels.name,
        group=labels.group,
        job_type=labels.job_type,
        tags=tracking.tags,
        config=public_config(labels.config),
        resume="allow",
        reinit="create_new",
        settings=_settings(),
    )


def _settings() -> wandb.Settings:
    import wandb

    return wandb.Settings(
        allow_val_change=True,
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=30.0,
        host="",
        init_timeout=10.0,
        login_timeout=10.0,
        program="heliostat",
        save_code=False,
        silent=True,
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=1.0,  # a kill loses what is not flushed
    )


def wandb_mode(tracking: Tracking) -> WandbMode:
    """Returns the recipe's choice, else what ``WANDB_MODE`` says, else ``offline``.

    Raises:
        UsageError: ``WANDB_MODE`` holds something else.
    """
    if tracking.wandb != "auto":
        return tracking.wandb
    mode = os.environ.get("WANDB_MODE") or "offline"
    if mode not in get_args(WandbMode):
        raise UsageError(
            f"expected WANDB_MODE to be one of {', '.join(get_args(WandbMode))}, found {mode!r}; "
            "set it to one of them or unset it"
        )
    return cast("WandbMode", mode)
