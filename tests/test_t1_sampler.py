"""The sampler against the model's own forward pass and Hugging Face's generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from algorithms.t1 import sampler
from algorithms.t1.decoders import HuggingFaceDecoder, LlamaDecoder
from algorithms.t1.model import (
    ModelShape,
    TokenScorer,
    local_model,
    scratch_model,
)
from algorithms.t1.sampler import Answers, Sampling, sample
from heliostat.errors import UsageError

VOCABULARY, END = 23, 22
SHAPE = ModelShape(hidden=32, layers=2, heads=2, head_dim=16, feed_forward=48, positions=64)


def sharpened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Moves all weights away from their initial values, norms too, so that errors would show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight * 5 if weight.ndim == 2 else weight + 0.3 * noise)
    return model


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return sharpened(scratch_model(SHAPE, VOCABULARY, END, seed=0))


@pytest.fixture(scope="module")
def grouped_llama() -> LlamaForCausalLM:
    """Four query heads share two key/value heads; embeddings are untied."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return sharpened(LlamaForCausalLM(config))


def prompts(count: int = 5, length: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(END, (count, length), generator=generator)


def drawn(model: LlamaForCausalLM, sampling: Sampling, seed: int = 0) -> Answers:
    return sample(model, prompts(), sampling, torch.Generator().manual_seed(seed))


def rescored(model: LlamaForCausalLM, answers: Answers, copies: int, temperature: float) -> Tensor:
    """Scores sampled answers with the model's forward pass, laid out like the answers."""
    asked = prompts().repeat_interleave(copies, dim=0)
    tokens = torch.cat([asked, answers.tokens], dim=1)
    real = torch.arange(answers.tokens.shape[1]) < answers.lengths[:, None]
    chosen = torch.cat([torch.zeros_like(asked, dtype=torch.bool), real], dim=1)
    with torch.no_grad():
        scores = TokenScorer(model)(tokens, chosen, temperature)
    return torch.zeros_like(answers.log_probs).masked_scatter(real, scores.log_probs)


@pytest.mark.parametrize("name", ["llama", "grouped_llama"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_equal_the_models_forward_pass(
    name: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    answers = drawn(model, Sampling(8, 30, END, temperature))
    assert 0 < answers.finished.sum() < len(answers.finished)
    expected = rescored(model, answers, 8, temperature)
    torch.testing.assert_close(answers.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "grouped_llama"])
def test_greedy_answers_equal_hugging_face_generate(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    answers = drawn(model, Sampling(1, 20, END, temperature=0.0))
    asked = prompts()
    generated = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=END,
    )
    assert isinstance(generated, Tensor)
    torch.testing.assert_close(answers.tokens, generated[:, asked.shape[1] :])
    torch.testing.assert_close(
        answers.log_probs, rescored(model, answers, 1, 1.0), atol=1e-4, rtol=0
    )


def test_direct_and_general_decoders_agree(
    grouped_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(6, 25, END, 1.1)
    direct = drawn(grouped_llama, sampling)
    monkeypatch.setattr(sampler, "decoder_for", HuggingFaceDecoder)
    general = drawn(grouped_llama, sampling)
    assert torch.equal(direct.tokens, general.tokens)
    assert torch.equal(direct.lengths, general.lengths)
    torch.testing.assert_close(direct.log_probs, general.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("decoder", [LlamaDecoder, HuggingFaceDecoder])
def test_left_padding_changes_nothing(
    llama: LlamaForCausalLM, decoder: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "decoder_for", decoder)
    sampling = Sampling(4, 20, END, 1.0)
    asked = prompts()
    padded = torch.cat([torch.full((5, 3), 1), asked], dim=1)
    real = torch.cat([torch.zeros(5, 3, dtype=torch.bool), torch.ones_like(asked).bool()], dim=1)
    plain = sample(llama, asked, sampling, torch.Generator().manual_seed(0))
    shifted = sample(llama, padded, sampling, torch.Generator().manual_seed(0), real)
    assert torch.equal(plain.tokens, shifted.tokens)
    torch.testing.assert_close(plain.log_probs, shifted.log_probs, atol=1e-4, rtol=0)


def test_a_model_that_is_no_llama_takes_the_general_path() -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=END,
        bos_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    assert not LlamaDecoder.serves(model)
    answers = sample(model, prompts(), Sampling(3, 12, END), torch.Generator().manual_seed(0))
    expected = rescored(model, answers, 3, 1.0)
    torch.testing.assert_close(answers.log_probs, expected, atol=1e-4, rtol=0)


def test_the_same_generator_gives_the_same_answers_whatever_was_drawn_elsewhere(
    llama: LlamaForCausalLM,
) -> None:
    sampling = Sampling(4, 20, END, 1.2)
    first = drawn(llama, sampling, seed=3)
    torch.manual_seed(99)
    second, other = drawn(llama, sampling, seed=3), drawn(llama, sampling, seed=4)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.log_probs, second.log_probs)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_compaction_of_ended_answers_changes_no_answer(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted = drawn(llama, Sampling(8, 30, END))
    monkeypatch.setattr(sampler, "_COMPACT_FRACTION", 1.0)
    whole = drawn(llama, Sampling(8, 30, END))
    assert torch.equal(compacted.tokens, whole.tokens)
    torch.testing.assert_close(compacted.log_probs, whole.log_probs, atol=1e-5, rtol=0)


def test_lengths_finish_reasons_and_padding_fit_together(llama: LlamaForCausalLM) -> None:
    answers = drawn(llama, Sampling(8, 15, END))
    real = torch.arange(answers.tokens.shape[1]) < answers.lengths[:, None]
    ends = (answers.tokens == END) & real
    assert torch.equal(ends.sum(dim=1), answers.finished.long())
    assert (answers.lengths[~answers.finished] == 15).all()
    assert (answers.tokens[~real] == END).all()
    assert (answers.log_probs[~real] == 0).all()


def test_frequencies_follow_the_tempered_distribution(llama: LlamaForCausalLM) -> None:
    asked = prompts(count=1)
    answers = sample(llama, asked, Sampling(20_000, 1, END, 2.0), torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = (llama(input_ids=asked).logits[0, -1] / 2.0).softmax(-1)
    got = torch.bincount(answers.tokens.flatten(), minlength=VOCABULARY) / 20_000
    torch.testing.assert_close(got, expected, atol=0.015, rtol=0)


def test_min_p_never_draws_unlikely_tokens_and_leaves_log_probs_untruncated(
    llama: LlamaForCausalLM,
) -> None:
    asked = prompts(count=1)
    sampling = Sampling(5_000, 1, END, 1.0, min_p=0.2)
    answers = sample(llama, asked, sampling, torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = llama(input_ids=asked).logits[0, -1].softmax(-1)
    seen = answers.tokens.unique()
    assert (p[seen] >= 0.2 * p.max()).all()
    assert len(seen) == int((p >= 0.2 * p.max()).sum()) < VOCABULARY
    torch.testing.assert_close(answers.log_probs.exp(), p[answers.tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers_per_prompt": 0}, "answers_per_prompt ≥ 1, found 0"),
        ({"max_new_tokens": 0}, "max_new_tokens ≥ 1, found 0"),
        ({"temperature": -1.0}, r"temperature ≥ 0, found -1.0"),
        ({"min_p": 1.0}, r"min_p < 1, found 1.0"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    fine = {"answers_per_prompt": 2, "max_new_tokens": 3, "end_token": END}
    with pytest.raises(ValueError, match=message):
        Sampling(**{**fine, **change})


def test_scores_of_a_hand_made_distribution(llama: LlamaForCausalLM) -> None:
    tokens = prompts(count=3)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[0, 2], chosen[1, 4], chosen[1, 5] = True, True, True
    scores = TokenScorer(llama)(tokens, chosen, 2.0)
    log_p = (llama(input_ids=tokens).logits / 2.0).log_softmax(-1)
    at = ((0, 1), (1, 3), (1, 4))
    expected = torch.stack([log_p[n, t, tokens[n, t + 1]] for n, t in at])
    entropies = torch.stack([-(log_p[n, t].exp() * log_p[n, t]).sum() for n, t in at])
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=1e-5)


def test_a_first_token_has_no_score(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"found chosen columns \[0\]"):
        TokenScorer(llama)(prompts(), torch.ones(5, 6, dtype=torch.bool))


def test_scratch_models_depend_on_their_seed_alone() -> None:
    torch.manual_seed(0)
    first = scratch_model(SHAPE, VOCABULARY, END, seed=5)
    second = scratch_model(SHAPE, VOCABULARY, END, seed=5)
    other = scratch_model(SHAPE, VOCABULARY, END, seed=6)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_saved_checkpoint_loads_and_answers_alike(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path)
    loaded = local_model(tmp_path)
    assert LlamaDecoder.serves(loaded)
    sampling = Sampling(2, 10, END)
    again = sample(loaded, prompts(), sampling, torch.Generator().manual_seed(0))
    assert torch.equal(again.tokens, drawn(llama, sampling).tokens)
    with pytest.raises(UsageError, match=r"no config\.json"):
        local_model(tmp_path / "nowhere")


def test_answers_may_take_part_in_a_backward_pass(llama: LlamaForCausalLM) -> None:
    answers = drawn(llama, Sampling(2, 5, END))
    weight = torch.ones((), requires_grad=True)
    (weight * answers.log_probs).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, answers.log_probs.sum())
