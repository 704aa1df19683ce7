"""Packed passes: every token once, and the scores and gradients of padded rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from algorithms.t1 import llama
from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.packing import pack

VOCABULARY = 13


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged prompts with ragged answers: (tokens, chosen, groups)."""
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
            min_size=1,
            max_size=4,
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    width = max(prompt + max(answers) for prompt, answers in shapes) + draw(st.integers(0, 2))
    tokens, chosen, groups = [], [], []
    for group, (prompt, answers) in enumerate(shapes):
        begin = torch.randint(VOCABULARY, (prompt,), generator=generator)
        for answer in answers:
            row = torch.randint(VOCABULARY, (width,), generator=generator)
            row[:prompt] = begin
            place = torch.arange(width)
            tokens.append(row)
            chosen.append((place >= prompt) & (place < prompt + answer))
            groups.append(group)
    return torch.stack(tokens), torch.stack(chosen), torch.tensor(groups)


@settings(max_examples=60, deadline=None)
@given(rows())
def test_a_packed_pass_reads_every_needed_token_once(case: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, chosen, groups = case
    packed = pack(tokens, chosen, groups)
    starts, ends = chosen.int().argmax(dim=1), (chosen * torch.arange(tokens.shape[1])).amax(dim=1)
    firsts = [groups.tolist().index(group) for group in groups.unique().tolist()]
    needed = int((ends - starts).sum() + starts[firsts].sum())
    assert len(packed.tokens) == needed
    assert torch.equal(packed.targets, tokens[chosen])
    for row, end in enumerate(ends.tolist()):
        read = packed.rows[row, :end]
        assert torch.equal(packed.tokens[read], tokens[row, :end])
        assert torch.equal(packed.positions[read], torch.arange(end))
    assert torch.equal(packed.rows.flatten()[packed.source], torch.arange(needed))


def scratch(heads: int = 2) -> LlamaForCausalLM:
    shape = ModelShape(hidden=32, layers=2, heads=heads, head_dim=8, feed_forward=16, positions=16)
    return scratch_model(shape, VOCABULARY, 0, seed=1)


def grouped_heads() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [scratch, grouped_heads])
@settings(max_examples=15, deadline=None)
@given(case=rows(), temperature=st.sampled_from([1.0, 1.2]))
def test_scores_and_gradients_do_not_depend_on_the_layout(
    make: object, case: tuple[Tensor, Tensor, Tensor], temperature: float
) -> None:
    tokens, chosen, groups = case
    assert callable(make)
    policy = make().double()
    for weight in policy.parameters():  # norms start as ones: move them off
        weight.data.add_(0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight))
    assert llama.serves(policy)
    results: list[tuple[Tensor, ...]] = []
    alone = torch.arange(len(tokens))
    for layout, known in (("shared", groups), ("shared", alone), ("rows", None), ("packed", None)):
        scores = TokenScorer(policy, layout)(tokens, chosen, temperature, known)
        weights = torch.linspace(-1, 1, len(scores.log_probs), dtype=torch.float64)
        loss = (weights * scores.log_probs).sum() + (weights.flip(0) * scores.entropies).sum()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        results.append((scores.log_probs, scores.entropies, *gradients))
    # the model's own norms compute in float32, whatever its weights are
    for other, tolerance in zip(results[1:], (1e-10, 1e-5, 1e-5), strict=True):
        for value, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, wanted, atol=tolerance, rtol=1e-4)


def test_the_direct_forward_serves_plain_float_llamas_alone() -> None:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
    )
    assert llama.serves(scratch())
    assert not llama.serves(Qwen2ForCausalLM(config))
    assert not llama.serves(scratch().bfloat16())
    checkpointed = scratch()
    checkpointed.activation_checkpointing_enable()
    assert not llama.serves(checkpointed)
    with torch.autocast("cpu", torch.bfloat16):
        assert not llama.serves(scratch())
    emptied = scratch()
    emptied.lm_head.weight.data = torch.empty(0)
    assert not llama.serves(emptied)


def test_another_model_is_scored_alike_in_rows_and_packed() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    policy = Qwen2ForCausalLM(config).double()
    tokens = torch.arange(27).view(3, 9) % VOCABULARY
    chosen = torch.zeros(3, 9, dtype=torch.bool)
    for row, (start, end) in enumerate([(2, 9), (4, 5), (1, 7)]):
        chosen[row, start:end] = True
    rows, packed = (TokenScorer(policy, way)(tokens, chosen) for way in ("rows", "packed"))
    torch.testing.assert_close(packed, rows, atol=1e-12, rtol=1e-9)
    auto = TokenScorer(policy)(tokens, chosen)
    torch.testing.assert_close(auto, rows)
