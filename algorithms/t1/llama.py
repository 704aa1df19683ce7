"""A plain Llama over packed tokens, with fused matrices and hand-written backward passes.

Same numbers as the model's own forward, but each token of a pass is read once, and three autograd
nodes a block keep what the backward pass needs and no more.

Shapes: ``U`` distinct tokens, ``R`` rows of ``W`` places (see ``packing``), ``H`` hidden width,
``Q`` query heads, ``G`` key/value heads, ``D`` width of a head, ``F`` feed-forward width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from algorithms.t1.packing import Packed
from algorithms.t1.scores import dot

_SHORT = 64
"""Longest row, in tokens, that plain attention serves on a CPU."""

# pyright: reportIncompatibleMethodOverride=false
# The override below: once_differentiable makes the parameters of a backward position-only.
# A context of PyTorch has no type; every forward and backward below takes one.
# ruff: noqa: ANN401


def serves(model: PreTrainedModel) -> bool:
    """Whether ``packed_logits`` may stand in for the model's own forward.

    It must be a Llama without biases, dropout or adapters, with silu, and hold its weights whole,
    in float32 or float64; autocast and activation checkpointing are left to the model itself.
    """
    if type(model) is not LlamaForCausalLM:
        return False
    config, weights = model.config, list(model.parameters())
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        return False
    if (model.training and config.attention_dropout) or model.is_activation_checkpointing:
        return False
    if any("forward" in vars(layer) for layer in model.model.layers):
        return False
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return False
    whole = all(type(w.data) is Tensor and w.numel() for w in weights)
    exact = all(w.dtype in {torch.float32, torch.float64} for w in weights)
    return whole and exact and not torch.is_autocast_enabled(weights[0].device.type)


def packed_logits(model: LlamaForCausalLM, packed: Packed) -> Float[Tensor, "M V"]:
    """Returns the logits behind ``packed.scored``; differentiable once.

    Args:
        model: One that ``serves`` accepts.
        packed: The layout, on the model's device.
    """
    config, decoder = model.config, model.model
    heads = config.num_attention_heads, cast("int", config.num_key_value_heads)
    epsilon = config.rms_norm_eps
    x = F.embedding(packed.tokens, decoder.embed_tokens.weight)
    cos, sin = decoder.rotary_emb(x, packed.positions[None])
    half = cos.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    turn = torch.cat([cos, signed])[:, :, None]
    for layer in decoder.layers:
        fused = fuse(cast("LlamaDecoderLayer", layer))
        qkv = cast("Tensor", _Project.apply(x, fused.qkv, turn, sum(heads), epsilon))
        attended = _attend(qkv, packed, heads)
        x = cast(
            "Tensor",
            _Advance.apply(x, attended, fused.out, fused.gate_up, fused.down, epsilon),
        )
    last = cast("Tensor", _Normed.apply(F.embedding(packed.scored, x), epsilon))
    return last @ folded(decoder.norm.weight, model.lm_head.weight)


class FusedLayer(NamedTuple):
    """One block's matrices as [in, out], with the weights of the norms before them in them."""

    qkv: Float[Tensor, "H QGGD"]
    out: Float[Tensor, "QD H"]
    gate_up: Float[Tensor, "H FF"]
    down: Float[Tensor, "F H"]


def fuse(layer: LlamaDecoderLayer) -> FusedLayer:
    """Returns a block's matrices; differentiable in its weights."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat(
        [
            attention.q_proj.weight * attention.scaling,
            attention.k_proj.weight,
            attention.v_proj.weight,
        ]
    )
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return FusedLayer(
        qkv=folded(layer.input_layernorm.weight, qkv),
        out=attention.o_proj.weight.T,
        gate_up=folded(layer.post_attention_layernorm.weight, gate_up),
        down=mlp.down_proj.weight.T,
    )


def folded(norm: Float[Tensor, " H"], matrix: Float[Tensor, "O H"]) -> Float[Tensor, "H O"]:
    """Moves a norm's weight into the matrix that follows it, and transposes."""
    return (matrix * norm).T


def _attend(
    qkv: Float[Tensor, "U QGG D"], packed: Packed, heads: tuple[int, int]
) -> Float[Tensor, "U QD"]:
    """Lets every token see its own row up to itself; queries are scaled already."""
    queries, groups = heads
    rows = cast("Tensor", _Spread.apply(qkv, packed.rows, packed.source, packed.shared))
    parts = torch.split(rows, [queries, groups, groups], dim=2)
    if not rows.is_cuda and queries == groups and rows.shape[1] <= _SHORT:
        seen = _attend_short(*parts)
    else:
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, enable_gqa=queries > groups
        ).transpose(1, 2)
    flat = seen.reshape(packed.rows.numel(), -1)
    return cast("Tensor", _Collect.apply(flat, packed.source))


def _attend_short(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "R W Q D"]:
    """Plain attention over [R, W, Q, D]: for short rows faster than a fused kernel on CPUs."""
    count, width, heads, size = q.shape
    q, k, v = (part.transpose(1, 2).reshape(-1, width, size) for part in (q, k, v))
    future = torch.ones(width, width, dtype=torch.bool).triu(1)
    hidden = q.new_zeros(width, width).masked_fill(future, -torch.inf)
    weights = torch.baddbmm(hidden, q, k.mT).softmax(dim=-1)
    return torch.bmm(weights, v).view(count, heads, width, size).transpose(1, 2)


class _Spread(torch.autograd.Function):
    """Copies flat tokens to the places of the rows; gradients of shared tokens add up."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, rows: Tensor, source: Tensor, shared: Tensor) -> Tensor:
        ctx.save_for_backward(rows, source, shared)
        return flat.index_select(0, rows.flatten()).view(*rows.shape, *flat.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        rows, source, shared = ctx.saved_tensors
        gradient = gradient.flatten(0, 1)
        flat = gradient.index_select(0, source)
        if len(shared):
            owners = rows.flatten().index_select(0, shared)
            flat.index_add_(0, owners, gradient.index_select(0, shared))
        return flat, None, None, None


class _Collect(torch.autograd.Function):
    """Reads each flat token from the one place of the rows that owns it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.shape = rows.shape
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        (source,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_put_((source,), gradient), None


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns (x / rms(x), 1 / rms(x))."""
    inverse = (dot(x, x)[:, None] / x.shape[1]).add_(epsilon).rsqrt_()
    return x * inverse, inverse


def _normed_backward(gradient: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
    """Returns ∂/∂x from ∂/∂y: (g - y mean(g y)) / rms(x)."""
    along = dot(gradient, y)[:, None] / y.shape[1]
    return torch.addcmul(gradient, y, along, value=-1).mul_(inverse)


class _Normed(torch.autograd.Function):
    """The norm before the head; its weight is in the head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        y, inverse = _normed(x, epsilon)
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _normed_backward(gradient, *ctx.saved_tensors), None


class _Project(torch.autograd.Function):
    """Norm, then queries, keys and values; the first ``turned`` heads are rotated.

    ``turn`` [2, U, 1, D] holds cosines and sines, the latter negated in their first half, so that
    a rotation is t cos + roll(t, D / 2) sin.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, turn: Tensor, turned: int, epsilon: float
    ) -> Tensor:
        y, inverse = _normed(x, epsilon)
        qkv = (y @ weight).view(len(x), -1, turn.shape[-1])
        rotated = qkv[:, :turned]
        rolled = rotated.roll(turn.shape[-1] // 2, dims=-1)
        rotated.mul_(turn[0]).addcmul_(rolled, turn[1])
        ctx.save_for_backward(y, inverse, weight, turn)
        ctx.turned = turned
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        y, inverse, weight, turn = ctx.saved_tensors
        rotated = gradient[:, : ctx.turned]
        back = (rotated * turn[1]).roll(turn.shape[-1] // 2, dims=-1).addcmul_(rotated, turn[0])
        flat = torch.cat([back, gradient[:, ctx.turned :]], dim=1).flatten(1)
        x = _normed_backward(flat @ weight.T, y, inverse)
        return x, y.T @ flat, None, None, None


class _Advance(torch.autograd.Function):
    """The attention's output and the gated feed-forward layer, added to the residual stream."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd takes its tensors one by one
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        out: Tensor,
        gate_up: Tensor,
        down: Tensor,
        epsilon: float,
    ) -> Tensor:
        middle = torch.addmm(x, attended, out)
        y, inverse = _normed(middle, epsilon)
        gate, up = (gated := y @ gate_up).chunk(2, dim=1)
        ctx.save_for_backward(attended, out, y, inverse, gate_up, gated, down)
        return torch.addmm(middle, F.silu(gate).mul_(up), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        attended, out, y, inverse, gate_up, gated, down = ctx.saved_tensors
        gate, up = gated.chunk(2, dim=1)
        squashed = torch.sigmoid(gate)
        silu = gate * squashed
        inner = gradient @ down.T
        gated_back = torch.empty_like(gated)
        gate_back, up_back = gated_back.chunk(2, dim=1)
        torch.mul(inner, silu, out=up_back)
        # silu' = σ (1 + z (1 - σ)) = σ + silu (1 - σ)
        slope = torch.addcmul(squashed + silu, silu, squashed, value=-1)
        torch.mul(inner.mul_(up), slope, out=gate_back)
        down_back = silu.mul_(up).T @ gradient
        middle = _normed_backward(gated_back @ gate_up.T, y, inverse).add_(gradient)
        return (
            middle,
            middle @ out.T,
            attended.T @ middle,
            y.T @ gated_back,
            down_back,
            None,
        )
