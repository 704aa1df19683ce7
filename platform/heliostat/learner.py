"""The learner: one model and its optimiser, alone or shared by the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from heliostat.errors import WeightsDiffer
from heliostat.layout import Layout
from heliostat.weights import Weights

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Optimizers = Optimizer | Sequence[Optimizer]
"""One optimiser, or several that share out the parameters."""
Tensors = Mapping[str, Tensor]
Publish = Callable[[Tensors], Tensors]
"""Turns a model's whole state into the weights that its actors load."""
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_LEAST_MOVE = 1e-9
"""A step of a smaller rate times gradient norm may leave every float32 weight as it is."""


class Learner(Generic[ModuleT]):
    """Trains ``model`` as the layout says: plain, data-parallel (ddp) or sharded (fsdp).

    ``heliostat.deepspeed_learner`` does the same by DeepSpeed's ZeRO.

    Every rank calls every method. Gradients are averaged over ranks: a loss is the mean over the
    rank's own share of the batch, or the share's part of a mean over all, times the ranks.
    """

    def __init__(
        self,
        model: ModuleT,
        optimizers: Callable[[ModuleT], Optimizers],
        layout: Layout,
        device: torch.device,
        world: int,
        publish: Publish = dict,
    ) -> None:
        self.model: ModuleT = model.to(device)
        """The module itself; call it through ``forward`` where gradients must meet."""
        self._device = device
        self._moved, self._key = False, ""
        self._bfloat16 = layout.precision == "bfloat16"
        self._publish = publish
        if layout.activation_checkpointing:
            for block in _blocks(self.model):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.forward: Callable[..., Any] = self.model
        if world > 1:
            self._share(optimizers, layout)
        self.restart(optimizers)

    def _share(self, optimizers: Callable[[ModuleT], Optimizers], layout: Layout) -> None:
        """Prepares the model for several ranks."""
        del optimizers
        if layout.parallelism == "ddp":
            self.forward = DistributedDataParallel(self.model)
        else:
            _shard(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context for forward passes at the layout's precision."""
        if not self._bfloat16:
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of one micro-batch's loss (a scalar with a graph).

        Every rank must call it equally often before each ``step``.
        """
        loss.backward()

    def step(self, rate: float = 1.0, max_norm: float = float("inf")) -> float:
        """Takes one optimiser step on the gradients so far and clears them.

        Args:
            rate: share of each group's initial learning rate that this step takes.
            max_norm: gradients are scaled down to this global 2-norm.

        Returns:
            The global 2-norm of the gradients before clipping.
        """
        largest = 0.0
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
                largest = max(largest, float(group["lr"]))
        norm = self._advance(max_norm)
        self._moved |= largest * min(norm, max_norm) > _LEAST_MOVE
        return norm

    def _advance(self, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        full = getattr(norm, "full_tensor", None)  # sharded gradients give a sharded norm
        return float(full() if full else norm)

    def restart(self, optimizers: Callable[[ModuleT], Optimizers]) -> None:
        """Begins a new phase: replaces the optimisers and forgets what they knew."""
        made = optimizers(self.model)
        self._optimizers = (made,) if isinstance(made, Optimizer) else tuple(made)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]

    def state(self) -> dict[str, Any]:
        """Returns model and optimiser, gathered whole on rank 0's CPU; other ranks may get none."""
        if not any(optimizer.state for optimizer in self._optimizers):
            # get_state_dict would take a step to make one, and Adam would count it
            return {"model": full_state(self.model), "optimizer": {}}
        model, optimizer = get_state_dict(self.model, self._optimizers, options=_FULL)
        return {"model": dict(model), "optimizer": dict(optimizer)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state`` returned, on any number of ranks.

        Learning rates and the like stay those of the optimisers that were made here.
        """
        self._moved = False
        if not state["optimizer"]:
            load_full_state(self.model, state["model"])
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        own = [{name: group[name] for name in group if name != "params"} for group in groups]
        set_state_dict(
            self.model,
            self._optimizers,
            model_state_dict=dict(state["model"]),
            optim_state_dict=dict(state["optimizer"]),
            options=_FULL,
        )
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, settings in zip(groups, own, strict=True):
            group.update(settings)

    def weights(self, version: int) -> Weights:
        """Snapshots the model for the actors, gathering shards where there are any.

        Raises:
            WeightsDiffer: steps with a gradient were taken since the last snapshot, yet this one is
                equal: what the steps trained is not what the actors get.
        """
        taken = Weights.of_tensors(self._publish(self._whole()), version)
        if self._moved and taken.key == self._key:
            raise WeightsDiffer(
                f"version {version}: expected weights changed by steps since the last snapshot, "
                f"found its digest {taken.key} again; check that the optimiser's parameters are "
                "those of the model that is sent"
            )
        self._moved, self._key = False, taken.key
        return taken

    def _whole(self) -> Tensors:
        options = StateDictOptions(full_state_dict=True)
        return cast("Tensors", get_model_state_dict(self.model, options=options))

    def pairs(self, frozen: ModuleT) -> tuple[list[Tensor], Iterator[Tensor]]:
        """Returns what a frozen copy holds of the trained parameters, and their values now."""
        held = dict(frozen.named_parameters())
        trained = {name: w for name, w in self.model.named_parameters() if w.requires_grad}
        return [held[name] for name in trained], map(self._value, trained.values())

    def _value(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()


def frozen_copy(model: ModuleT, layout: Layout, device: torch.device, world: int) -> ModuleT:
    """Copies a model that will not be trained itself, such as an anchor; sharded under fsdp.

    Make it before the learner, which changes the model in place. It shares what the model does not
    train with it, as far as ranks do not shard that.
    """
    shared = {id(w): w for w in model.parameters() if not w.requires_grad}
    sharded = world > 1 and layout.parallelism != "ddp"
    copy = deepcopy(model, {} if sharded else shared).requires_grad_(requires_grad=False)
    copy.to(device)
    if sharded and layout.parallelism == "fsdp":
        _shard(copy, reshard=True)  # no backward pass will do it
    return copy


def _shard(model: nn.Module, reshard: bool | None = None) -> None:
    """Shards every block and the rest; ``reshard`` says whether the rest is, after a forward."""
    for block in _blocks(model):
        fully_shard(block)
    fully_shard(model, reshard_after_forward=reshard)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated parts, such as the layers of a transformer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for module in lists for block in module]


def full_state(module: nn.Module) -> dict[str, Any]:
    """Returns a module's state, gathered whole on rank 0's CPU; other ranks may get none."""
    return dict(get_model_state_dict(module, options=_FULL))


def load_full_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restores what ``full_state`` returned, on any number of ranks."""
    set_model_state_dict(module, dict(state), options=_FULL)
