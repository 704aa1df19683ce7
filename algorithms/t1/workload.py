"""T1 as a workload: its numbers, its named recipes, its roles and its plots."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from heliostat import Hosts, Layout, Plot, Recipe, Workload
from heliostat.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class T1Recipe(Recipe):
    """Numbers of T1 (arXiv 2501.11651); ``steps`` counts updates of reinforcement learning."""

    paths: ClassVar[tuple[str, ...]] = ("questions", "test_questions", "model")

    questions: str = ""
    """JSONL file in the form of GSM8K, MATH or AIME; empty plays countdown, or ``gym``."""
    test_questions: str = ""
    """JSONL file of test questions; empty holds out a tenth of ``questions``."""
    leaks: Literal["drop", "refuse", "report"] = "drop"
    """What to do with test questions whose text, or nearly so, is trained on."""
    gym: str = ""
    """Task of reasoning-gym by its name, such as ``chain_sum``, in place of ``questions``."""
    gym_size: Annotated[int, Ge(100)] = 2000
    """Problems of it."""
    verifier: Literal["exact", "math"] = "exact"
    """What tells answers right: exact numbers and texts, or math-verify where these do not."""
    verifier_s: Annotated[float, Gt(0)] = 5.0
    """Seconds that one answer may take; then it counts as wrong."""
    verifier_workers: Annotated[int, Ge(1)] = 1
    """Processes that judge at once, in each sampling host."""
    min_gold_parsed: Annotated[float, Ge(0), Le(1)] = 0.95
    """Share of the gold answers that the verifier must be able to judge."""
    model: str = ""
    """Folder of a Hugging Face checkpoint; empty trains a small Llama from scratch."""
    hidden: Annotated[int, Ge(8)] = 96
    """Width of the scratch model; a multiple of 32, the width of a head."""
    layers: Annotated[int, Ge(1)] = 3
    """Blocks of the scratch model."""
    feed_forward: Annotated[int, Ge(1)] = 256
    """Width of its feed-forward layers."""
    positions: Annotated[int, Ge(1)] = 512
    """Longest prompt plus answer it can read, in tokens."""

    lora_rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters that are trained in place of the matrices; 0 trains all weights."""
    lora_alpha: Annotated[float, Gt(0)] = 16.0
    """Adapters count lora_alpha / lora_rank times."""

    level: Literal["three", "wide", "four"] = "three"
    """Of countdown: three numbers in 1..9, three in 1..20, or four in 1..9."""
    max_failures: Annotated[int, Ge(0)] = 5
    """Largest number of failed tries in a countdown trace."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon`` moves the hidden matrices by Muon, the rest by AdamW; not for sharded models."""

    sft_steps: Annotated[int, Ge(0)] = 500
    """Supervised steps on traces of trial, error and self-verification (section 2)."""
    sft_batch: Annotated[int, Ge(1)] = 64
    """Traces a supervised step."""
    sft_lr: Annotated[float, Gt(0)] = 3e-3
    """Peak rate of AdamW."""
    sft_muon_lr: Annotated[float, Gt(0)] = 0.02
    """Peak rate of Muon, if used."""

    sft_warm_steps: Annotated[int, Ge(0)] = 30
    """Supervised steps over which the rate rises to its peak; then it falls along a cosine."""

    prompts_per_step: Annotated[int, Ge(1)] = 32
    """Prompts of one update."""
    answers_per_prompt: Annotated[int, Ge(2)] = 64
    """K: answers sampled to each prompt."""
    prompts_per_job: Annotated[int, Ge(1)] = 16
    """Prompts of one call to a sampler; how many samplers there are changes no number."""
    max_new_tokens: Annotated[int, Ge(1)] = 10_240
    """Longest answer; one that is longer is cut and counts as over-long."""
    temperature: Annotated[float, Gt(0)] = 1.2
    """Sampling temperature of training."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Tokens less likely than this share of the likeliest are not sampled."""
    engine: Literal["native", "transformers", "vllm"] = "native"
    """What samples: our own sampler, Hugging Face's ``generate`` as its reference, or vLLM."""
    max_staleness: Annotated[int, Ge(0)] = 1
    """How many updates old the weights behind a token may be; 0 samples and learns in turn."""
    partial_tokens: Annotated[int, Ge(0)] = 0
    """Tokens after which answers sampled ahead pause, to go on with newer weights; 0 never."""
    sample_deadline_s: Annotated[float, Ge(0)] = 0.0
    """Seconds after which they pause, 0 never; other than with tokens, no run is like another."""
    dynamic_sampling: Annotated[int, Ge(0)] = 0
    """Most rounds of further prompts an update in place of those whose answers all earned the same,
    which teach nothing and are left out; 0 takes none."""

    lr: Annotated[float, Gt(0)] = 1.5e-6
    """Peak rate of AdamW in reinforcement learning."""
    muon_lr: Annotated[float, Gt(0)] = 2e-3
    """Peak rate of Muon, if used."""
    final_rate: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the peak rate left at the last update, reached along a cosine; 1 is constant."""
    warm_updates: Annotated[int, Ge(1)] = 3
    """Updates over which the rate rises to ``lr``."""
    advantage: Literal["rloo", "grpo", "reinforce"] = "rloo"
    """What an answer's reward is compared with: the mean of the others, that of the group in units
    of its deviation, or nothing."""
    kl: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the anchor enters: the reward, centred over the other answers (T1), or the
    loss, token by token."""
    beta: Annotated[float, Ge(0)] = 2e-4
    """Weight of the KL to the anchor."""
    entropy_coef: Annotated[float, Ge(0)] = 1e-3
    """Weight of the token-level entropy bonus."""
    anchor_decay: Annotated[float, Ge(0), Le(1)] = 0.99
    """Share of the old anchor kept when it moves; 1 freezes it, 0 makes it a copy of the policy."""
    anchor_every: Annotated[int, Ge(1)] = 1
    """Updates between two moves of the anchor."""
    loss_norm: Literal["token", "sequence", "constant"] = "token"
    """What the sum over tokens is divided by."""
    drop_flat_groups: bool = False
    """Learn only from prompts with both right and wrong answers."""
    importance: Literal["truncated", "clipped", "none"] = "truncated"
    """How tokens of older weights are corrected: weights up to a cap, PPO's clip, or not."""
    importance_cap: Annotated[float, Ge(1)] = 2.0
    """Largest weight under ``truncated``."""
    clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
    """How far below 1 a ratio counts under ``clipped``."""
    clip_high: Annotated[float, Gt(0)] = 0.2
    """And how far above."""
    max_norm: Annotated[float, Gt(0)] = 1.0
    """Largest 2-norm of a gradient."""
    tokens_per_pass: Annotated[int, Ge(1)] = 16_384
    """Distinct tokens of one forward and backward pass; changes memory, no other number."""

    penalise: tuple[Literal["overlong", "repetition", "garbage"], ...] = ()
    """Patterns whose answers get the reward -1, right or wrong (section 3.2)."""
    ngram: Annotated[int, Ge(1)] = 20
    """Length of a repeated phrase, in tokens."""
    ngram_repeats: Annotated[int, Ge(1)] = 4
    """How often it may occur."""
    garbage_perplexity: Annotated[float, Gt(1)] = 50.0
    """Answers of a higher perplexity under the anchor, at the sampling temperature, are garbage."""

    eval_every: Annotated[int, Ge(1)] = 10
    """Updates between two evaluations on validation prompts, beside training."""
    eval_prompts: Annotated[int, Ge(1)] = 256
    """Validation prompts of each."""
    test_prompts: Annotated[int, Ge(1)] = 1024
    """Held-out prompts of the scores before and after reinforcement learning."""
    test_answers: Annotated[int, Ge(1)] = 4
    """Answers to each of them at temperature 1; the k of pass@k."""

    turn_every: Annotated[int, Ge(0)] = 0
    """Updates between two judgements of the rollout temperature by TURN, a multiple of
    ``eval_every``; 0 makes none. Each samples ``turn_prompts`` answers at 14 temperatures."""
    turn_prompts: Annotated[int, Ge(1)] = 128
    """Validation prompts of each; the curve of entropies is smooth only with enough of them."""

    @property
    def total_steps(self) -> int:
        """Supervised steps and updates together."""
        return self.sft_steps + self.steps

    def check(self) -> None:
        """Refuses missing files and a model that cannot be built.

        Raises:
            UsageError: says which, and what to do.
        """
        self._check_questions()
        for key in ("prompts_per_step", "sft_batch"):
            if getattr(self, key) < self.layout.learners:
                raise UsageError(
                    f"{key}: expected at least layout.learners={self.layout.learners}, "
                    f"found {getattr(self, key)}; each rank needs some"
                )
        self._check_model()
        self._check_engine()
        if self.turn_every % self.eval_every:
            raise UsageError(
                f"turn_every: expected a multiple of eval_every={self.eval_every}, found "
                f"{self.turn_every}; it is done beside an evaluation"
            )
        if self.optimizer == "muon" and self.layout.parallelism != "ddp":
            raise UsageError("optimizer: muon needs layout.parallelism=ddp; take adamw")

    def _check_model(self) -> None:
        config = Path(self.model) / "config.json"
        if self.model and not config.is_file():
            raise UsageError(
                f"model: expected a folder with config.json, found none at {self.model!r}; "
                "give what save_pretrained wrote, or leave it empty for a small Llama"
            )
        if self.model and not self.questions and not self.gym:
            from envs.countdown import VOCABULARY

            found = json.loads(config.read_text()).get("vocab_size")
            if found != len(VOCABULARY):
                raise UsageError(
                    f"model: countdown has its own vocabulary of {len(VOCABULARY)} tokens, found "
                    f"vocab_size={found} in {str(config)!r}; give questions=FILE.jsonl too"
                )
        if not self.model and self.hidden % 32:
            raise UsageError(f"hidden: expected a multiple of 32, found {self.hidden}")
        if self.lora_rank and find_spec("peft") is None:
            raise UsageError(
                "lora_rank: adapters need peft, found none; pip install 'heliostat[lora]', or "
                "train all weights with lora_rank=0"
            )
        if self.lora_rank and self.optimizer == "muon":
            raise UsageError("lora_rank: muon is for whole matrices; take optimizer=adamw")

    def _check_engine(self) -> None:
        if self.engine == "vllm" and self.min_p > 0:
            raise UsageError(
                f"min_p: expected 0 with engine=vllm, found {self.min_p}; vLLM tells "
                "log-probabilities of what is left after truncation; take engine=native"
            )
        if (self.partial_tokens or self.sample_deadline_s) and self.max_staleness == 0:
            raise UsageError(
                "max_staleness: expected at least 1 with partial_tokens or sample_deadline_s, "
                "found 0; answers that are needed at once cannot pause"
            )

    def _check_questions(self) -> None:
        for key in ("questions", "test_questions"):
            path = getattr(self, key)
            if path and not Path(path).is_file():
                raise UsageError(
                    f"{key}: expected a JSONL file, found none at {path!r}; "
                    "give its path, or leave it empty"
                )
        if self.gym and (self.questions or self.test_questions):
            raise UsageError(
                f"gym: expected no file beside it, found questions={self.questions!r}, "
                f"test_questions={self.test_questions!r}; give one or the other"
            )
        if self.test_questions and not self.questions:
            raise UsageError(
                f"test_questions: expected questions to train on too, found only "
                f"{self.test_questions!r}; give questions=FILE.jsonl"
            )
        if self.questions or self.gym:
            from algorithms.t1.questions import check_questions

            check_questions(self)


_SMALL = T1Recipe(
    steps=70,
    checkpoint_every=100,
    layout=Layout.laptop(),
    max_failures=3,
    optimizer="muon",
    sft_steps=700,
    sft_batch=40,
    sft_lr=1e-2,
    sft_muon_lr=0.02,
    prompts_per_step=32,
    prompts_per_job=32,
    answers_per_prompt=8,
    max_new_tokens=28,  # three tries and the end token: one try less than the longest trace
    temperature=1.0,
    lr=4e-4,
    muon_lr=2e-3,
    warm_updates=10,
    final_rate=0.1,
    entropy_coef=3e-3,
    anchor_decay=0.95,
    drop_flat_groups=True,
    tokens_per_pass=1600,
)

WORKLOAD = Workload(
    name="t1",
    summary="RL for reasoning: trial-and-error SFT, then over-sampled RLOO with a moving anchor.",
    paper="Hou et al. 2025, T1 (arXiv 2501.11651)",
    recipes={
        "laptop": _SMALL,
        "smoke": replace(
            _SMALL,
            sft_steps=150,
            steps=8,
            warm_updates=3,
            prompts_per_step=16,
            test_prompts=256,
            test_answers=2,
            eval_prompts=64,
            eval_every=4,
        ),
        "more-sft": replace(_SMALL, sft_steps=1280, steps=0),
        "paper": T1Recipe(
            steps=1000,
            checkpoint_every=50,
            layout=replace(Layout.cluster(), environment=Hosts(hosts=32, gpus=1, cpus=4)),
            sft_steps=1125,
            sft_batch=32,
            sft_lr=1e-5,
            eval_every=50,
            test_prompts=500,
        ),
    },
    train="algorithms.t1.train:train",
    export="algorithms.t1.export:export",
    roles={
        "problems": "algorithms.t1.roles:Problems",
        "samplers": "algorithms.t1.roles:Samplers",
        "solvers": "algorithms.t1.roles:Solvers",
    },
    spaces={
        "small": {
            "lr": "loguniform(5e-5, 5e-4)",
            "temperature": "uniform(0.9, 1.3)",
            "answers_per_prompt": "choice(4, 16, 64)",
        }
    },
    score="eval/accuracy",
    plots=(
        Plot(
            title="Accuracy on validation prompts, temperature 1",
            metrics=("eval/accuracy",),
            level="sft_accuracy",
        ),
        Plot(
            title="False claims of success",
            metrics=("eval/false_claims",),
            level="sft_false_claims",
        ),
        Plot(title="Training reward", metrics=("train/reward", "train/accuracy")),
        Plot(title="Response length in tokens", metrics=("train/length",)),
        Plot(title="Entropy in nats a token", metrics=("train/entropy",)),
        Plot(
            title="TURN: the last good temperature less that of training",
            metrics=("train/turn_margin",),
        ),
        Plot(title="KL to the anchor in nats an answer", metrics=("train/kl",)),
        Plot(title="Age of the sampling weights in updates", metrics=("lag/versions",)),
        Plot(title="Supervised loss in nats a token", metrics=("sft/loss",)),
    ),
)
