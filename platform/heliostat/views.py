"""Views of a run beside its JSON lines: W&B and TensorBoard, and what may be published there."""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast, get_args

import numpy as np
import numpy.typing as npt

from heliostat.errors import UsageError
from heliostat.tracker import (
    Cell,
    FanOut,
    JsonlTracker,
    Number,
    RunLabels,
    Tracker,
    WandbMode,
    finite,
    histogram,
    png,
)

if TYPE_CHECKING:
    import wandb
    from matplotlib.figure import Figure
    from tensorboardX import SummaryWriter

logger = logging.getLogger("heliostat")


def open_trackers(
    folder: Path,
    *,
    wandb: WandbMode | None = None,
    tensorboard: bool = False,
    **labels: Unpack[RunLabels],
) -> Tracker:
    """Opens the JSON lines of a run and the views beside them; a view that fails is left out.

    Args:
        folder: the run's folder, made where missing.
        wandb: where W&B logs; None asks ``WANDB_MODE`` and else means offline.
        tensorboard: whether to write TensorBoard's files too.
        labels: see ``RunLabels``.

    Raises:
        UsageError: ``WANDB_MODE`` holds something unknown.
    """
    mode = wandb_mode(wandb)
    primary = JsonlTracker(folder)
    openers: list[Callable[[], Tracker]] = []
    if mode != "disabled":
        openers.append(lambda: WandbTracker(folder, mode=mode, **labels))
    if tensorboard:
        openers.append(lambda: TensorBoardTracker(folder))
    views: list[Tracker] = []
    for opener in openers:
        try:
            views.append(opener())
        except Exception as error:  # noqa: BLE001 - as in FanOut, a view must not end a run
            logger.warning("a tracker could not start and the run goes on: %r", error)
    return FanOut(primary, views)


class WandbTracker:
    """Logs to Weights & Biases: into ``<folder>/wandb`` unless ``WANDB_MODE`` says ``online``.

    All attempts of a run share its id. Rows are kept in the order of logging and carry ``step``,
    the x-axis of every chart, and ``attempt``, which grows with each process that opened the run.
    W&B cannot take rows back, so ``rewind`` leaves the rows of the attempt that died: where a chart
    shows a step twice, the higher attempt counts. ``wandb sync <folder>/wandb/offline-run-*``
    uploads what was logged offline, all attempts in order.

    A server that cannot be reached within ten seconds, or refuses, makes the run an offline one.
    Neither code, git state, command line, host name, package list nor console is recorded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: WandbMode | None = None,
        project: str | None = None,
        **labels: Unpack[RunLabels],
    ) -> None:
        """Opens the run.

        Args:
            folder: the run's folder.
            mode: where to log; None asks ``WANDB_MODE`` and else means offline.
            project: W&B's project; None asks ``WANDB_PROJECT`` and else means ``heliostat``.
            labels: see ``RunLabels``.
        """
        # Reports of W&B's own faults hold paths, and hang for a minute where nothing answers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._staging = folder / "wandb" / "staging"
        self._attempt = 1 + len(list(folder.glob(f"wandb/*run-*-{labels['run_id']}")))
        folder.mkdir(parents=True, exist_ok=True)

        def start(mode: WandbMode) -> wandb.Run:
            return wandb.init(
                dir=folder,
                mode=mode,
                project=project or os.environ.get("WANDB_PROJECT") or "heliostat",
                id=labels["run_id"],
                name=labels["name"],
                group=labels["group"],
                job_type=labels["job_type"],
                config=public_config(labels["config"]),
                resume="allow",
                reinit="create_new",
                settings=_wandb_settings(),
            )

        mode = wandb_mode(mode)
        try:
            self._run = start(mode)
            refused = "nobody logged in" if mode == "online" and self._run.disabled else None
        except wandb.Error as error:
            if mode != "online":
                raise
            refused = str(error)
        if refused:
            logger.warning("W&B is not reachable, logging offline instead: %s", refused)
            wandb.teardown()  # the failed start still holds the run's id
            self._run = start("offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Hands one row to W&B's own process."""
        # W&B drops rows whose own step does not grow, so it counts rows and ``step`` is a column.
        self._run.log({**metrics, "step": step, "attempt": self._attempt})

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Logs the rows as one ``wandb.Table``."""
        import wandb

        table = wandb.Table(columns=list(columns), data=list(rows), allow_mixed_types=True)
        with _variable("WANDB_DATA_DIR", str(self._staging)):
            self._run.log({name: table, "step": step, "attempt": self._attempt})

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Logs 64 bins as ``wandb.Histogram``."""
        import wandb

        counts, edges = histogram(values)
        drawn = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
        self._run.log({name: drawn, "step": step, "attempt": self._attempt})

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Logs a picture as ``wandb.Image``."""
        import wandb
        from PIL import Image

        with Image.open(io.BytesIO(png(figure))) as picture:
            image = wandb.Image(picture)
        self._run.log({name: image, "step": step, "attempt": self._attempt})

    def rewind(self, step: int) -> None:
        """Does nothing: the next rows say by ``attempt`` that they replace the former."""

    def finish(self, exit_code: int = 0) -> None:
        """Uploads what is pending, within half a minute, or three seconds where the run failed.

        What is not uploaded by then waits on the disk for ``wandb sync``.

        Raises:
            TimeoutError: the run failed and its end is still being uploaded.
        """
        done: Future[None] = Future()

        def finish() -> None:
            try:
                done.set_result(self._run.finish(exit_code))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                done.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        done.result(timeout=3.0 if exit_code else None)


def _wandb_settings() -> wandb.Settings:
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


def wandb_mode(choice: WandbMode | None = None) -> WandbMode:
    """Returns the caller's choice, else what ``WANDB_MODE`` says, else ``offline``.

    Raises:
        UsageError: ``WANDB_MODE`` holds something else.
    """
    mode = choice or os.environ.get("WANDB_MODE") or "offline"
    if mode not in get_args(WandbMode):
        raise UsageError(
            f"expected WANDB_MODE to be one of {', '.join(get_args(WandbMode))}, found {mode!r}; "
            "set it to one of them or unset it"
        )
    return cast("WandbMode", mode)


@contextmanager
def _variable(name: str, value: str) -> Generator[None]:
    """Sets an environment variable for a while, where it is not set: W&B offers no other way."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


class TensorBoardTracker:
    """Writes TensorBoard's event files into ``<folder>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer = self._opened(purge_step=None)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Adds one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Adds the rows as a table of text."""
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
        self._writer.add_text(name, table, step)

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Adds the finite values, in bins that grow exponentially."""
        if (found := finite(values)).size:
            self._writer.add_histogram(name, found, step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Adds a picture."""
        from PIL import Image

        with Image.open(io.BytesIO(png(figure))) as picture:
            self._writer.add_image(
                name, np.asarray(picture.convert("RGB")), step, dataformats="HWC"
            )

    def rewind(self, step: int) -> None:
        """Starts a new event file, which makes TensorBoard hide later steps of the former."""
        self._writer.close()
        self._writer = self._opened(purge_step=step + 1)

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - for services only
        """Flushes and closes the event file."""
        self._writer.close()

    def _opened(self, purge_step: int | None) -> SummaryWriter:
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)


MASK = "***"
_ALWAYS_SECRET = re.compile(r"secret|passw|passphrase|credential|apikey", re.IGNORECASE)
_SECRET_AT_THE_END = {"auth", "key", "keys", "token", "tokens"}
_CREDENTIAL = re.compile(
    r"""
    \b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|wandb_v1_)[\w-]{16,}
    | \bAKIA[A-Z0-9]{16}\b                                 # an access key of AWS
    | \beyJ[\w-]+\.[\w-]+\.[\w-]*                         # a JSON web token
    | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)                      # user:password@host
    | (?:(?<=[Bb]earer\ )|(?<=[Bb]asic\ ))[\w.~+/=-]{8,}   # a header of HTTP
    | [?&][\w-]*(?i:key|token|auth|password|secret|sig|signature|credential)=[^&\s]+
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----.*
    """,
    re.VERBOSE | re.DOTALL,
)


def public_config(
    config: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> dict[str, object]:
    """Returns a copy of ``config`` that may be shown to others, made of plain JSON values.

    ``***`` stands for values under names such as ``hf_token``, ``apiKey`` or ``password`` (numbers
    such as ``max_tokens`` stay), for texts in the form of well-known credentials, and for values of
    secret-named variables of ``environ`` wherever they occur. Home folders become ``~``.
    """
    secrets = [value for name, value in environ.items() if len(value) >= 8 and _secret(name, value)]
    secrets.sort(key=len, reverse=True)
    secret = re.compile("|".join(re.escape(value) for value in secrets) or r"(?!)")
    own = environ.get("HOME", "").rstrip("/") or "/root"
    home = re.compile(rf"(?<![\w.~-])(?:{re.escape(own)}|/root|/(?:home|Users)/[\w.-]+)(?![\w-])")

    def scrub(text: str) -> str:
        return home.sub("~", _CREDENTIAL.sub(MASK, secret.sub(MASK, text)))

    def public(value: object) -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value).items()
            return {
                scrub(str(name)): MASK if _secret(str(name), item) else public(item)
                for name, item in items
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [public(item) for item in cast("Iterable[object]", value)]
        return scrub(str(value))

    return cast("dict[str, object]", public(config))


def _secret(name: str, value: object) -> bool:
    """Whether a name such as ``HF_TOKEN`` or ``apiKey`` promises a secret."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if value is None or isinstance(value, bool) or not words:
        return False
    number = isinstance(value, int | float)
    return bool(_ALWAYS_SECRET.search(name)) or (words[-1] in _SECRET_AT_THE_END and not number)
