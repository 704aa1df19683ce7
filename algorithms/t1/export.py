"""Writes a run's policy as a Hugging Face checkpoint, which ``model=FOLDER`` reads again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from algorithms.t1.lora import merged
from algorithms.t1.model import TokenScorer
from algorithms.t1.tasks import make_policy, make_task
from algorithms.t1.workload import T1Recipe


def export(recipe: T1Recipe, state: Mapping[str, Any], folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors``, and the tokenizer if the run had one.

    The weights are those of the checkpoint to the last bit; adapters come merged.

    Args:
        recipe: of the run.
        state: of one of its checkpoints.
        folder: made where missing.
    """
    policy = make_policy(recipe, make_task(recipe))
    TokenScorer(policy).load_state_dict(merged(state["policy"]["model"], recipe))
    policy.save_pretrained(folder)
    if recipe.questions and recipe.model:
        from transformers import AutoTokenizer

        tokenizer = cast("Any", AutoTokenizer).from_pretrained(recipe.model, local_files_only=True)
        tokenizer.save_pretrained(folder)
