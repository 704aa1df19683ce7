"""One side of ``benchmarks.t1``: TRL's GRPOTrainer on countdown, run by a Python that has TRL.

``python trl_grpo.py JSON`` reads its settings from the one argument and prints one JSON line:
seconds of each whole step and of the rollouts inside it. It imports nothing of heliostat but the
grader in ``envs.countdown``.
"""

# ruff: noqa: ANN401 - TRL's own signatures

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from envs import countdown


class Timed(GRPOTrainer):
    """The trainer, with the time of its rollouts noted."""

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        outputs = super()._generate_and_score_completions(*args, **kwargs)
        ROLLOUTS.append(time.perf_counter() - start)
        return outputs


class Clock(TrainerCallback):
    """Notes when each step begins and ends."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        STEPS.append(-time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stops it."""
        STEPS[-1] += time.perf_counter()


STEPS: list[float] = []
ROLLOUTS: list[float] = []


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Grades answers as our own sampler does: 1 for a right one, else 0."""
    problems = np.array(
        [[int(word) for word in text.split() if word.isdigit()] for text in prompts]
    )
    longest = max(map(len, completion_ids))
    answers = np.full((len(prompts), longest), countdown.PAD, np.int64)
    for row, tokens in enumerate(completion_ids):
        answers[row, : len(tokens)] = tokens
    graded = countdown.grade(countdown.Problems(problems[:, :3], problems[:, 3]), answers)
    return graded.solved.astype(float).tolist()


def main() -> None:
    """Trains for a few steps and prints what they took."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(told["threads"])
    words = Tokenizer(WordLevel(dict(zip(countdown.VOCABULARY, range(111), strict=True)), "_"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="E", pad_token="_")
    whole = countdown.problems("train")
    texts = [
        f"Q {a} {b} {c} = {t} :"
        for (a, b, c), t in zip(whole.numbers.tolist(), whole.targets.tolist(), strict=True)
    ]
    trainer = Timed(
        model=LlamaForCausalLM.from_pretrained(told["model"], local_files_only=True),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=told["output"],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=told["prompts"] * told["answers"],
            gradient_accumulation_steps=1,
            num_generations=told["answers"],
            max_completion_length=told["max_new_tokens"],
            max_steps=told["steps"],
            learning_rate=1e-9,
            temperature=1.0,
            beta=told["beta"],
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()
    sys.stdout.write(json.dumps({"steps_s": STEPS, "rollouts_s": ROLLOUTS}) + "\n")


if __name__ == "__main__":
    main()
