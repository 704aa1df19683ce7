"""Decoders: a causal model with the key/value caches of the answers that still run.

Llamas take a direct forward pass over fused weights, every other causal model its own forward with
a dynamic cache.

Shapes: ``P`` prompts, ``K`` answers each, ``N = P * K`` answers, ``S`` prompt tokens, ``B`` answers
still running, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from algorithms.t1.llama import FusedLayer, folded, fuse


@runtime_checkable
class Decoder(Protocol):
    """A model with the caches of the answers that still run."""

    def prefill(
        self, prompts: Int[Tensor, "P S"], real: Bool[Tensor, "P S"] | None, copies: int, room: int
    ) -> Float[Tensor, "N V"]:
        """Reads the prompts, makes ``copies`` of each and ``room`` for tokens; gives logits."""
        ...

    def step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Appends one token to each running answer and returns the logits of the next."""
        ...

    def keep(self, rows: Int[Tensor, " B"]) -> None:
        """Drops all running answers but ``rows``."""
        ...


def decoder_for(model: PreTrainedModel) -> Decoder:
    """Returns the direct decoder for a plain Llama and the general one for any other model."""
    if LlamaDecoder.serves(model):
        return LlamaDecoder(cast("LlamaForCausalLM", model))
    return HuggingFaceDecoder(model)


class HuggingFaceDecoder:
    """Decodes with the model's own forward pass and a dynamic cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._real: Bool[Tensor, "B _"] = torch.empty(0, 0, dtype=torch.bool)
        self._positions: Int[Tensor, "B 1"] = torch.empty(0, 1, dtype=torch.int64)

    def prefill(
        self, prompts: Int[Tensor, "P S"], real: Bool[Tensor, "P S"] | None, copies: int, room: int
    ) -> Float[Tensor, "N V"]:
        """Reads the prompts; the cache grows by itself, so that ``room`` is not needed."""
        del room
        real = torch.ones_like(prompts, dtype=torch.bool) if real is None else real
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._forward(prompts, real, positions)
        self._cache.batch_repeat_interleave(copies)
        self._real = real.repeat_interleave(copies, dim=0)
        self._positions = positions[:, -1:].repeat_interleave(copies, dim=0)
        return logits.repeat_interleave(copies, dim=0)

    def step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Appends one token to each running answer."""
        self._real = F.pad(self._real, (0, 1), value=True)
        self._positions = self._positions + 1
        return self._forward(tokens[:, None], self._real, self._positions)

    def keep(self, rows: Int[Tensor, " B"]) -> None:
        """Drops all running answers but ``rows``."""
        self._cache.batch_select_indices(rows)
        self._real, self._positions = self._real[rows], self._positions[rows]

    def _forward(self, tokens: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=real.long(),
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class LlamaDecoder:
    """Decodes a plain Llama without its modules: fused matrices and buffers of fixed size.

    Shapes: ``G`` key/value heads, ``R`` query heads for each of them, ``D`` width of a head, ``H``
    hidden width, ``C`` capacity of the caches.
    """

    @staticmethod
    def serves(model: PreTrainedModel) -> bool:
        """Whether ``model`` is a Llama without biases, with silu and unsharded float32 weights.

        In shorter types the fused matrices would round unlike the model's own.
        """
        if type(model) is not LlamaForCausalLM:
            return False
        config, weights = model.config, [weight.data for weight in model.parameters()]
        biased = config.attention_bias or config.mlp_bias
        plain = all(type(w) is Tensor and w.dtype == torch.float32 for w in weights)
        return plain and not biased and config.hidden_act == "silu"

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        self._groups = cast("int", config.num_key_value_heads)
        self._repeats = config.num_attention_heads // self._groups
        self._width = cast("int", config.head_dim)
        self._epsilon: float = config.rms_norm_eps
        self._rotary = model.model.rotary_emb
        self._embedding = model.model.embed_tokens.weight
        self._layers = [
            _in_order(fuse(cast("LlamaDecoderLayer", layer))) for layer in model.model.layers
        ]
        self._head = folded(model.model.norm.weight, model.lm_head.weight).contiguous()
        self._keys: list[Float[Tensor, "BG C D"]] = []
        self._values: list[Float[Tensor, "BG C D"]] = []
        self._size = 0
        self._real: Bool[Tensor, "B C"] | None = None
        self._cos = self._sin = self._embedding

    def prefill(
        self, prompts: Int[Tensor, "P S"], real: Bool[Tensor, "P S"] | None, copies: int, room: int
    ) -> Float[Tensor, "N V"]:
        """Reads the prompts and lays out the caches of their ``copies`` answers."""
        count, length = prompts.shape
        self._size = length
        self._set_rotations(prompts, real, length + room)
        mask = None if real is None else _causal_mask(real)
        x = F.embedding(prompts.flatten(), self._embedding)
        for layer in self._layers:
            q, k, v = self._project(layer, x, count, slice(0, length))
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=self._repeats > 1
            )
            x = self._advance(layer, x, attended.transpose(1, 2).reshape(count * length, -1))
            for caches, new in ((self._keys, k), (self._values, v)):
                cache = new.new_empty(count * copies * self._groups, length + room, self._width)
                cache[:, :length] = new.repeat_interleave(copies, dim=0).flatten(0, 1)
                caches.append(cache)
        if real is not None:
            self._real = F.pad(real, (0, room), value=True).repeat_interleave(copies, dim=0)
            self._cos = self._cos.repeat_interleave(copies, dim=0)
            self._sin = self._sin.repeat_interleave(copies, dim=0)
        return self._logits(x.view(count, length, -1)[:, -1]).repeat_interleave(copies, dim=0)

    def step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Appends one token to each running answer."""
        place, self._size = self._size, self._size + 1
        hidden = None if self._real is None else ~self._real[:, : self._size]
        x = F.embedding(tokens, self._embedding)
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            q, k, v = self._project(layer, x, len(tokens), slice(place, self._size))
            keys[:, place] = k.reshape(-1, self._width)
            values[:, place] = v.reshape(-1, self._width)
            queries = q.reshape(-1, self._repeats, self._width)
            scores = torch.bmm(queries, keys[:, : self._size].mT)
            if hidden is not None:
                rows = hidden.repeat_interleave(self._groups, dim=0)[:, None]
                scores = scores.masked_fill(rows, -torch.inf)
            attended = torch.bmm(scores.softmax(dim=-1), values[:, : self._size])
            x = self._advance(layer, x, attended.view(len(tokens), -1))
        return self._logits(x)

    def keep(self, rows: Int[Tensor, " B"]) -> None:
        """Drops all running answers but ``rows``."""
        heads = torch.arange(self._groups, device=rows.device)
        owned = (rows[:, None] * self._groups + heads).flatten()
        # index_select is five times faster than keys[owned] on a CPU
        self._keys = [keys.index_select(0, owned) for keys in self._keys]
        self._values = [values.index_select(0, owned) for values in self._values]
        if self._real is not None:
            self._real, self._cos, self._sin = self._real[rows], self._cos[rows], self._sin[rows]

    def _set_rotations(
        self, prompts: Int[Tensor, "P S"], real: Bool[Tensor, "P S"] | None, capacity: int
    ) -> None:
        """Tabulates cosines and signed sines, ``[P or 1, C, D]``, for positions from 0."""
        positions = torch.arange(capacity, device=prompts.device)[None]
        if real is not None:
            positions = (positions - (~real).sum(dim=1, keepdim=True)).clamp(min=0)
        cos, sin = self._rotary(self._embedding, positions)
        half = self._width // 2
        self._cos, self._sin = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

    def _project(
        self, layer: FusedLayer, x: Float[Tensor, "BT H"], batch: int, places: slice
    ) -> tuple[Float[Tensor, "B GR T D"], Float[Tensor, "B G T D"], Float[Tensor, "B G T D"]]:
        """Computes rotated queries (already scaled by D^-1/2) and keys, and values."""
        queries = self._groups * self._repeats
        qkv = (self._normed(x) @ layer.qkv).view(batch, -1, queries + 2 * self._groups, self._width)
        turned, values = qkv[:, :, : -self._groups], qkv[:, :, -self._groups :]
        cos, sin = self._cos[:, places, None], self._sin[:, places, None]
        turned = torch.addcmul(turned * cos, turned.roll(self._width // 2, dims=-1), sin)
        q, k = turned[:, :, :queries], turned[:, :, queries:]
        return q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2)

    def _advance(
        self, layer: FusedLayer, x: Float[Tensor, "BT H"], attended: Float[Tensor, "BT GRD"]
    ) -> Float[Tensor, "BT H"]:
        """Adds the attention's output and the gated feed-forward layer to the residual stream."""
        x = torch.addmm(x, attended, layer.out)
        gate, up = (self._normed(x) @ layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _normed(self, x: Float[Tensor, "BT H"]) -> Float[Tensor, "BT H"]:
        return F.rms_norm(x, x.shape[-1:], eps=self._epsilon)

    def _logits(self, x: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        return self._normed(x) @ self._head


def _in_order(layer: FusedLayer) -> FusedLayer:
    """Copies the matrices that fusing made, so that a token reads each from front to back."""
    return layer._replace(qkv=layer.qkv.contiguous(), gate_up=layer.gate_up.contiguous())


def _causal_mask(real: Bool[Tensor, "P S"]) -> Bool[Tensor, "P 1 S S"]:
    """Who sees whom in left-padded prompts; padding sees itself, for a row of softmax needs one."""
    length = real.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    return ((causal & real[:, None, :]) | (causal & causal.T))[:, None]
