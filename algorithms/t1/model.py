"""The policy: a causal transformer of Hugging Face, from scratch or from a local checkpoint.

Shapes: ``N`` sequences, ``T`` tokens, ``V`` vocabulary, ``M`` chosen tokens (a flat axis over the
``True`` entries of a mask, row by row, so that padding costs no memory after the transformer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from algorithms.t1 import llama
from algorithms.t1.packing import pack
from algorithms.t1.scores import TokenScores, token_scores
from heliostat.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Size of a scratch Llama: the defaults have 343,104 parameters at 111 tokens of vocabulary."""

    hidden: int = 96
    """Width of the residual stream."""
    layers: int = 3
    """Number of transformer blocks."""
    heads: int = 3
    """Attention heads."""
    head_dim: int = 32
    """Width of a head; 32 and 64 are served by every attention kernel."""
    feed_forward: int = 256
    """Width of the gated feed-forward layer."""
    positions: int = 128
    """Longest prompt plus answer, in tokens."""


def scratch_model(
    shape: ModelShape, vocabulary: int, end_token: int, seed: int
) -> LlamaForCausalLM:
    """Builds a Llama with tied embeddings; its weights depend on ``shape`` and ``seed`` alone.

    Args:
        shape: Size of the model.
        vocabulary: Number of tokens, ``V``.
        end_token: The token that ends an answer.
        seed: Of the initial weights, in [0, 2**63).

    Returns:
        The model in float32 on the CPU, in training mode (it has no dropout).
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_token,
        pad_token_id=None,
        initializer_range=0.05,  # 0.02 suits wide models; a narrow one starts too close to zero
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def local_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads a causal language model that was saved with ``save_pretrained``; never downloads.

    Args:
        folder: Holds ``config.json`` and the weights.
        dtype: Of the loaded weights.

    Raises:
        UsageError: ``folder`` holds no ``config.json``.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"expected a Hugging Face checkpoint, found no config.json in {str(folder)!r}; "
            "give the folder that save_pretrained wrote"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return cast("PreTrainedModel", model)


PassLayout = Literal["auto", "rows", "packed", "shared"]


class TokenScorer(nn.Module):
    """Scores given tokens: the differentiable half of the policy, to be wrapped by DDP or FSDP.

    A plain Llama reads the distinct tokens of a pass by a direct forward ("shared"); any other
    model reads padded rows ("rows"), or all sequences behind each other in one row whose positions
    start anew ("packed"), which pays where attention is of variable length (flash attention).

    Example:
        ``scores = TokenScorer(policy)(tokens, chosen)``, where row n of ``tokens`` is prompt,
        answer, padding and ``chosen`` marks the answer.
    """

    def __init__(self, policy: PreTrainedModel, layout: PassLayout = "auto") -> None:
        super().__init__()
        self.policy = policy
        self.layout: PassLayout = layout

    def forward(
        self,
        tokens: Int[Tensor, "N T"],
        chosen: Bool[Tensor, "N T"],
        temperature: float = 1.0,
        groups: Int[Tensor, " N"] | None = None,
    ) -> TokenScores:
        """Returns log-probabilities and entropies of the chosen tokens, in row-major order.

        Padding must stand to the right: attention is causal, so that no mask is needed.

        Args:
            tokens: Sequences, padded on the right with any valid token.
            chosen: Tokens to score; the first of a sequence has no context and cannot be chosen.
            temperature: Divides the logits, > 0; that of the sampler to score its own samples.
            groups: Rows of equal number begin alike up to their first chosen token (answers to
                one prompt), so that their beginning may be read once; None tells nothing.

        Raises:
            ValueError: A first token is chosen, or no token at all.
        """
        columns = cast("list[int]", chosen.any(dim=0).nonzero().squeeze(1).tolist())
        if not columns or columns[0] == 0:
            raise ValueError(
                "expected at least one chosen token and none in the first column, which has no "
                f"context; found chosen columns {columns[:1]}; choose the answer tokens only"
            )
        layout = self._layout() if self.layout == "auto" else self.layout
        if layout == "rows":
            window = slice(columns[0], columns[-1] + 1)
            logits = self.policy(
                input_ids=tokens[:, : columns[-1]],
                use_cache=False,
                logits_to_keep=columns[-1] + 1 - columns[0],
            ).logits
            mask = chosen[:, window]
            return token_scores(logits[mask], tokens[:, window][mask], temperature)
        if layout == "shared":
            packed = pack(tokens, chosen, groups)
            logits = llama.packed_logits(cast("LlamaForCausalLM", self.policy), packed)
        else:
            packed = pack(tokens, chosen)
            logits = self.policy(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                logits_to_keep=packed.scored,
            ).logits[0]
        return token_scores(logits, packed.targets, temperature)

    def _layout(self) -> PassLayout:
        if llama.serves(self.policy):
            return "shared"
        attention = str(getattr(self.policy.config, "_attn_implementation", ""))  # has no getter
        return "packed" if "flash" in attention else "rows"


def optimizers(
    kind: Literal["adamw", "muon"], lr: float, muon_lr: float, weight_decay: float
) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Returns what makes the optimisers of a policy.

    Args:
        kind: ``muon`` moves the matrices inside the transformer by Muon, its steps scaled to
            AdamW's, and the rest by AdamW; on countdown that needs about half the supervised steps
            of AdamW alone. ``adamw`` moves everything by AdamW.
        lr: of AdamW, betas (0.9, 0.98).
        muon_lr: of Muon.
        weight_decay: of matrices; vectors, and under Muon embeddings and head, are spared.
    """

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        tables = [
            weight
            for m in model.modules()
            if isinstance(m, nn.Embedding)
            for weight in m.parameters()
        ]
        heads = [w for name, w in model.named_parameters() if "lm_head" in name]
        outside = {id(weight) for weight in (*tables, *heads)}
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        inner = [w for w in weights if w.ndim == 2 and id(w) not in outside]
        if kind == "adamw":
            groups = [
                {"params": [w for w in weights if w.ndim >= 2], "weight_decay": weight_decay},
                {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
            ]
            groups = [group for group in groups if group["params"]]
            return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)]
        known = {id(weight) for weight in inner}
        rest = [weight for weight in weights if id(weight) not in known]
        return [
            torch.optim.Muon(
                inner, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    return make
