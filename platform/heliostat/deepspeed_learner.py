"""The learner by DeepSpeed: ZeRO shards optimiser state (1), gradients (2) and weights (3).

DeepSpeed's own checkpoints are pickles for one number of ranks. This one gathers the state whole,
in the learner's format, so that any layout resumes it. The optimiser is the method's own, so that
DeepSpeed compiles nothing on a CPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from heliostat.errors import UsageError
from heliostat.layout import Layout
from heliostat.learner import Learner, ModuleT, Optimizers


class DeepSpeedLearner(Learner[ModuleT]):
    """Trains ``model`` over the ranks by ZeRO, at the layout's stage.

    Raises:
        UsageError: there is not one optimiser, or a restart groups the parameters otherwise.
    """

    def _share(self, optimizers: Callable[[ModuleT], Optimizers], layout: Layout) -> None:
        optimizer = _only(optimizers(self.model))
        self._groups = self._grouping(optimizer)
        deepspeed: Any = import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # It would compile an operator that only speeds up ranks of one machine on CPUs, and hang
        # where an earlier compilation was killed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ.setdefault("LOCAL_RANK", str(distributed.get_rank()))
        self._whole_weights = deepspeed.zero.GatheredParameters
        """Context in which sharded weights are whole; it does nothing to others."""
        self._fragments: Any = import_module("deepspeed.utils")
        self._engine: Any = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer,
            config=_config(layout),
            dist_init_required=False,
        )[0]
        self._zero: Any = self._engine.optimizer
        self._stage = layout.zero_stage
        self._optimizers = (optimizer,)
        self.forward = self._engine

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of one micro-batch's loss (a scalar with a graph)."""
        self._engine.backward(loss)

    def _advance(self, max_norm: float) -> float:
        self._zero.clip_grad = max_norm
        self._engine.step()
        self._stepped = True
        return float(self._engine.get_global_grad_norm())

    def restart(self, optimizers: Callable[[ModuleT], Optimizers]) -> None:
        """Begins a new phase: takes the settings of new optimisers and forgets what was known."""
        held = self._optimizers[0]
        with self._whole_weights(list(self.model.parameters())):
            made = _only(optimizers(self.model))
            groups = self._grouping(made)
        if type(made) is not type(held) or groups != self._groups:
            raise UsageError(
                f"expected {type(held).__name__} over parameters grouped as {self._groups}, found "
                f"{type(made).__name__} over {groups}; DeepSpeed keeps what it began with"
            )
        for group, wanted in zip(held.param_groups, made.param_groups, strict=True):
            group.update({name: wanted[name] for name in wanted if name != "params"})
            group["initial_lr"] = group["lr"]
        for kept in held.state.values():
            for value in kept.values():
                value.zero_()
        self._stepped = False

    def state(self) -> dict[str, Any]:
        """Returns model and optimiser, gathered whole on rank 0's CPU; other ranks get none."""
        first = distributed.get_rank() == 0
        optimizer: dict[str, Any] = {}
        if self._stepped:
            self._link()
            groups = [
                {**{key: group[key] for key in group if key != "params"}, "params": names}
                for group, names in zip(self._optimizers[0].param_groups, self._groups, strict=True)
            ]
            kept = {name: dict(self._kept(w)) for name, w in self._trained()}
            optimizer = {"state": kept, "param_groups": groups}
        model = self._whole()
        return {"model": model, "optimizer": optimizer} if first else {"model": {}, "optimizer": {}}

    def _kept(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields what the optimiser knows of a parameter; every rank must ask."""
        partition, sample = next(iter(self._optimizers[0].state.items()))
        for key, value in sample.items():
            if value.shape == partition.shape:
                whole = self._fragments.safe_get_full_optimizer_state(parameter, key)
                yield key, whole.cpu()
            else:
                yield key, value.cpu().clone()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state`` of any learner returned, on any number of ranks."""
        self._moved = False
        with torch.no_grad():
            for name, target in self.model.state_dict(keep_vars=True).items():
                with self._whole_weights([target], modifier_rank=0):
                    target.copy_(state["model"][name])
        self._zero.refresh_fp32_params()
        if state["optimizer"]:
            self._load_optimizer(state["optimizer"]["state"])
            self._stepped = True

    def _load_optimizer(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        sharded = self._stage == 3
        zero, example = self._zero, next(iter(saved.values()))
        for partition in (
            zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups
        ):
            self._optimizers[0].state[partition] = {
                key: torch.zeros_like(partition) if value.ndim else value.clone()
                for key, value in example.items()
            }
        self._link()
        for name, parameter in self._trained():
            for key, value in saved[name].items():
                if not value.ndim:
                    continue
                if sharded:
                    part = _part_of_rank(value.to(self._device))
                    self._fragments.safe_set_local_optimizer_state(parameter, part, key)
                else:
                    whole = value.to(self._device)
                    self._fragments.safe_set_full_optimizer_state(parameter, whole, key)

    def _link(self) -> None:
        """Lets DeepSpeed find the optimiser's state by parameter.

        By itself it does so once, when only the first group has taken a step.
        """
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _whole(self) -> dict[str, Tensor]:
        weights = self.model.state_dict(keep_vars=True)
        return {name: self._value(weight).cpu() for name, weight in weights.items()}

    def _value(self, parameter: Tensor) -> Tensor:
        with self._whole_weights([parameter]):
            return parameter.detach().clone()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, w) for name, w in self.model.named_parameters() if w.requires_grad)

    def _grouping(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        return [[names[id(w)] for w in group["params"]] for group in optimizer.param_groups]


def _only(optimizers: Optimizers) -> Optimizer:
    if isinstance(optimizers, Optimizer):
        return optimizers
    if len(optimizers) != 1:
        names = [type(optimizer).__name__ for optimizer in optimizers]
        raise UsageError(
            f"layout.parallelism: deepspeed moves all weights by one optimiser, found {names}; "
            "choose another optimiser, or take ddp"
        )
    return optimizers[0]


def _part_of_rank(value: Tensor) -> Tensor:
    """Cuts this rank's part of a flattened tensor, the last part filled up with zeros."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    size = -(-value.numel() // world)
    part = value.new_zeros(size)
    mine = value.flatten()[rank * size : (rank + 1) * size]
    part[: len(mine)] = mine
    return part


def _config(layout: Layout) -> dict[str, Any]:
    """Returns DeepSpeed's settings: the caller says where a step ends, and clips at each."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # its own count of samples, of no effect here
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,  # set anew at each step
        "zero_optimization": {"stage": layout.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {
            "enabled": layout.precision == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # gradients travel in float32
        },
    }
