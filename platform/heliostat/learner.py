"""The learner: one model and its optimiser, alone or shared by the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heliostat.recipe import Layout
from heliostat.weights import Weights

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Learner(Generic[ModuleT]):
    """Trains ``model`` as the layout says: plain, data-parallel (ddp) or sharded (fsdp).

    Every rank calls every method; gradients are averaged over ranks, so that a loss must be the
    mean over the rank's own share of the batch.
    """

    def __init__(
        self,
        model: ModuleT,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        layout: Layout,
        device: torch.device,
        world: int,
    ) -> None:
        self.model: ModuleT = model.to(device)
        """The module itself; call it through ``forward`` where gradients must meet."""
        self._device = device
        self._bfloat16 = layout.precision == "bfloat16"
        self.forward: Callable[..., Any] = self.model
        if world > 1 and layout.parallelism == "ddp":
            self.forward = DistributedDataParallel(self.model)
        elif world > 1:
            for module in list(self.model.modules()):
                if isinstance(module, nn.ModuleList):
                    for block in module:
                        fully_shard(block)
            fully_shard(self.model)
        self.optimizer = optimizer(self.model.parameters())

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context for forward passes at the layout's precision."""
        if not self._bfloat16:
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def step(
        self, loss: torch.Tensor, *, lr: float | None = None, max_norm: float = float("inf")
    ) -> float:
        """Takes one optimiser step on ``loss`` (a scalar) and clears the gradients.

        Args:
            loss: scalar with a graph.
            lr: learning rate of this step for every group; None keeps the optimiser's own.
            max_norm: gradients are scaled down to this global 2-norm.

        Returns:
            The global 2-norm of the gradients before clipping.
        """
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        full = getattr(norm, "full_tensor", None)  # sharded gradients give a sharded norm
        return float(full() if full else norm)

    def state(self) -> dict[str, Any]:
        """Returns model and optimiser, gathered whole on rank 0's CPU; other ranks may get none."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_FULL)
        return {"model": dict(model), "optimizer": dict(optimizer)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state`` returned, on any number of ranks."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=dict(state["model"]),
            optim_state_dict=dict(state["optimizer"]),
            options=_FULL,
        )

    def weights(self, version: int) -> Weights:
        """Snapshots the model for the actors, gathering shards where there are any."""
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        return Weights.of_tensors(cast("dict[str, torch.Tensor]", whole), version)
