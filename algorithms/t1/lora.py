"""LoRA (arXiv 2106.09685): W + (α / r) B A, of which only A and B are trained.

The learner's model carries adapters; actors and exported checkpoints get the merged matrices under
the plain model's names, so that none of them needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from algorithms.t1.workload import T1Recipe
from heliostat.seeding import derive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def with_adapters(policy: PreTrainedModel, recipe: T1Recipe) -> PreTrainedModel:
    """Puts adapters beside every matrix but the embeddings and the head, and freezes the rest.

    Args:
        policy: changed in place; a model with fresh adapters computes what it did before.
        recipe: gives rank, α and the seed of A; a rank of 0 leaves the model as it is.
    """
    if not recipe.lora_rank:
        return policy
    peft: Any = import_module("peft")
    config = peft.LoraConfig(
        r=recipe.lora_rank, lora_alpha=recipe.lora_alpha, target_modules="all-linear"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "adapters"))
        return peft.inject_adapter_in_model(config, policy)


def merging(recipe: T1Recipe) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Returns ``merged`` for a recipe, as a learner takes it to publish its weights."""
    return partial(merged, recipe=recipe)


def merged(state: Mapping[str, Tensor], recipe: T1Recipe) -> dict[str, Tensor]:
    """Returns a whole state under the plain model's names, adapters merged into its matrices.

    Args:
        state: of the model with adapters, or of one without.
        recipe: gives rank and α.
    """
    scale = recipe.lora_alpha / max(1, recipe.lora_rank)

    def whole(name: str) -> Tensor:
        if not (_BASE in name and name.endswith(".weight")):
            return state[name]
        up, down = (state[name.replace(_BASE, part)] for part in (_UP, _DOWN))
        return state[name] + (up @ down) * scale

    plain = [name for name in state if _DOWN not in name and _UP not in name]
    return {name.replace(_BASE, "."): whole(name) for name in plain}
