"""Recorded steps for RLlib's offline algorithms, read from Parquet into memory.

RLlib's own reader puts Ray Data between a file and a local learner, which costs several processes
and gives another order in each run. It can also unpickle; here only columns of numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow.dataset
import torch
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.offline.offline_prelearner import OfflinePreLearner

from heliostat.errors import UsageError

COLUMNS = ("eps_id", "obs", "actions", "rewards", "new_obs", "terminateds", "truncateds")
"""One row a step; observations and actions are numbers or lists of them."""


def read_steps(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Reads all Parquet files of a folder.

    Returns:
        Column -> array [steps, ...].

    Raises:
        UsageError: there is no such folder or file, or a column is missing or uneven.
    """
    paths = sorted(map(str, folder.glob("*.parquet")))
    if not paths:
        raise UsageError(
            f"data: expected a folder with *.parquet files, found none at {str(folder)!r}; "
            "give the folder that holds the recorded steps"
        )
    table: Any = cast("Any", pyarrow.dataset).dataset(paths, format="parquet").to_table()
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise UsageError(
            f"data: expected the columns {', '.join(COLUMNS)} in {folder}, found "
            f"{', '.join(table.column_names)}; {', '.join(missing)} are missing"
        )
    try:
        return {name: np.array(table.column(name).to_pylist()) for name in COLUMNS}
    except ValueError as error:
        raise UsageError(f"data: {folder} holds rows of several lengths: {error}") from None


class RecordedSteps(OfflineData):
    """Gives RLlib's local learner batches of steps drawn at random, with replacement."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - RLlib's AlgorithmConfig
        self.config = config
        self.steps = read_steps(Path(config.input_[0]))
        self.rng = np.random.default_rng()
        """Draws the batches; whoever trains seeds it."""
        self.iter_batches_kwargs: dict[str, Any] = {}
        self._prelearner: Any = None

    def sample(self, *_: object, **__: object) -> Sequence[RecordedSteps]:
        """Returns what RLlib iterates over."""
        return [self]

    def iter_torch_batches(
        self,
        *,
        batch_size: int,
        device: Any,  # noqa: ANN401 - torch's or None
        **_: object,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yields batches without end, as RLlib's connectors prepare them: flat name -> tensor."""
        if self._prelearner is None:
            self._prelearner = self._prepare()
        count = len(self.steps["rewards"])
        while True:
            rows = self.rng.integers(count, size=batch_size)
            batch = self._prelearner({name: column[rows] for name, column in self.steps.items()})
            yield {
                name: torch.as_tensor(value).to(device)
                for name, value in batch.items()
                if getattr(value, "dtype", None) != np.dtype(object)
            }

    def _prepare(self) -> Any:  # noqa: ANN401 - RLlib's OfflinePreLearner
        found: Any = self  # RLlib sets more attributes
        made: Any = OfflinePreLearner(
            config=self.config, spaces=found.spaces[INPUT_ENV_SPACES], module_spec=found.module_spec
        )
        made._module = found.learner_handles[0].module  # values are those of the day
        return made
