"""Every engine keeps one contract; ``generate`` of Hugging Face is the reference."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import vllm_stand_in
from torch import Tensor
from transformers import LlamaForCausalLM

from algorithms.t1.engines import Engine, NativeEngine, TransformersEngine, make_engine
from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.sampler import Answers, Finish, Pause, Sampling
from algorithms.t1.workload import WORKLOAD
from heliostat.errors import UsageError, WeightsDiffer
from heliostat.weights import Weights

VOCABULARY, END, LIMIT = 23, 22, 20
SHAPE = ModelShape(hidden=64, layers=2, heads=2, head_dim=32, feed_forward=48, positions=64)
GREEDY = Sampling(1, LIMIT, END, temperature=0.0)
DRAWN = Sampling(6, LIMIT, END, temperature=1.3)
NO_VLLM = importlib.util.find_spec("vllm") is None


def policy(seed: int = 0) -> LlamaForCausalLM:
    """Weights away from their initial values, norms too, so that errors would show."""
    model = scratch_model(SHAPE, VOCABULARY, END, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight * 4 if weight.ndim == 2 else weight + 0.3 * noise)
    return model


def weights(seed: int, version: int = 1) -> Weights:
    return Weights.of_tensors(TokenScorer(policy(seed)).state_dict(), version)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PROMPTS = torch.randint(END, (5, 7), generator=generator(7))
REAL = torch.arange(7) >= torch.tensor([0, 2, 1, 4, 0])[:, None]


@pytest.fixture(
    scope="module",
    params=[
        "native",
        "transformers",
        "vllm-stand-in",
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(
                NO_VLLM, reason="vLLM is not installed: no dependency of ours"
            ),
        ),
    ],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    name, _, stand_in = request.param.partition("-")
    recipe = replace(WORKLOAD.recipe("smoke"), engine=name, positions=64)
    with pytest.MonkeyPatch.context() as patch:
        if stand_in:
            patch.setitem(sys.modules, "vllm", vllm_stand_in)
        return make_engine(recipe, policy)


@pytest.fixture(scope="module")
def reference() -> Engine:
    return TransformersEngine(TokenScorer(policy()).eval())


def rescored(answers: Answers, copies: int, temperature: float) -> Tensor:
    """Scores answers by the learner's forward pass over the unpadded ids that it was given."""
    found = torch.zeros_like(answers.log_probs)
    scorer = TokenScorer(policy()).eval()
    for row, length in enumerate(answers.lengths.tolist()):
        prompt = PROMPTS[row // copies][REAL[row // copies]]
        tokens = torch.cat([prompt, answers.tokens[row, :length]])[None]
        chosen = torch.arange(tokens.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            found[row, :length] = scorer(tokens, chosen, temperature).log_probs
    return found


def assert_same(one: Answers, other: Answers) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.finish, other.finish)
    torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=0)


def test_greedy_answers_are_those_of_the_reference(engine: Engine, reference: Engine) -> None:
    engine.load(weights(0))
    ours = engine.sample(PROMPTS, GREEDY, generator(), REAL)
    assert_same(ours, reference.sample(PROMPTS, GREEDY, generator(), REAL))
    assert len(ours.lengths.unique()) > 1, "a test of answers that end at different places"


def test_log_probs_are_the_learners_own(engine: Engine) -> None:
    engine.load(weights(0))
    answers = engine.sample(PROMPTS, DRAWN, generator(), REAL)
    expected = rescored(answers, DRAWN.answers_per_prompt, DRAWN.temperature)
    torch.testing.assert_close(answers.log_probs, expected, atol=1e-4, rtol=0)


def test_min_p_leaves_log_probs_untruncated_or_is_refused(engine: Engine) -> None:
    engine.load(weights(0))
    sampling = replace(DRAWN, min_p=0.3)
    if not isinstance(engine, NativeEngine | TransformersEngine):
        with pytest.raises(ValueError, match="min_p: expected 0 with engine=vllm"):
            engine.sample(PROMPTS, sampling, generator(), REAL)
        return
    answers = engine.sample(PROMPTS, sampling, generator(), REAL)
    expected = rescored(answers, sampling.answers_per_prompt, sampling.temperature)
    torch.testing.assert_close(answers.log_probs, expected, atol=1e-4, rtol=0)


def test_equal_generators_give_equal_answers(engine: Engine) -> None:
    engine.load(weights(0))
    first, again, other = (
        engine.sample(PROMPTS, DRAWN, generator(seed), REAL) for seed in (3, 3, 4)
    )
    assert_same(first, again)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_every_answer_says_why_it_ended(engine: Engine) -> None:
    engine.load(weights(0))
    answers = engine.sample(PROMPTS, replace(DRAWN, max_new_tokens=8), generator(), REAL)
    places = torch.arange(answers.tokens.shape[1])
    inside = places < answers.lengths[:, None]
    ends = ((answers.tokens == END) & inside).sum(dim=1)
    assert torch.equal(ends, (answers.finish == Finish.END).long())
    assert (answers.lengths[answers.finish == Finish.LENGTH] == 8).all()
    assert set(answers.finish.tolist()) == {Finish.END, Finish.LENGTH}
    assert (answers.tokens[~inside] == END).all()
    assert (answers.log_probs[~inside] == 0).all()


def test_paused_greedy_answers_go_on_as_if_nothing_had_been(engine: Engine) -> None:
    engine.load(weights(0))
    whole = engine.sample(PROMPTS, GREEDY, generator(), REAL)
    parts = engine.sample(PROMPTS, GREEDY, generator(), REAL, pause=Pause(tokens=1))
    assert (parts.lengths == 1).all()
    calls = 1
    while len(parts.running):
        parts = engine.sample(PROMPTS, GREEDY, generator(), REAL, parts, Pause(tokens=4))
        calls += 1
    assert calls == 1 + -(-(int(whole.lengths.max()) - 1) // 4)
    assert_same(parts, whole)


def test_a_deadline_ends_the_call_and_keeps_what_was_written(engine: Engine) -> None:
    engine.load(weights(0))
    long = replace(DRAWN, max_new_tokens=50, end_token=END)
    parts = engine.sample(PROMPTS, long, generator(), REAL, pause=Pause(seconds=1e-9))
    assert 1 <= int(parts.lengths.max()) < 50 or len(parts.running) == 0
    before = parts.tokens.clone(), parts.lengths.clone()
    after = engine.sample(PROMPTS, long, generator(), REAL, parts)
    assert len(after.running) == 0
    kept = torch.arange(before[0].shape[1]) < before[1][:, None]
    assert torch.equal(after.tokens[:, : kept.shape[1]][kept], before[0][kept])


def test_weights_that_come_back_bring_their_answers_back(engine: Engine) -> None:
    """No cache of keys, fused matrices or prefixes outlives the weights it was made with."""
    engine.load(weights(0))
    first = engine.sample(PROMPTS, GREEDY, generator(), REAL)
    engine.load(weights(1))
    other = engine.sample(PROMPTS, GREEDY, generator(), REAL)
    engine.load(weights(0))
    assert_same(engine.sample(PROMPTS, GREEDY, generator(), REAL), first)
    assert other.tokens.shape != first.tokens.shape or not torch.equal(other.tokens, first.tokens)


def test_an_interrupted_native_rollout_is_the_uninterrupted_one() -> None:
    """Draws belong to (answer, place), so that pauses change no number; ragged lengths too."""
    engine = NativeEngine(TokenScorer(policy()).eval())
    whole = engine.sample(PROMPTS, DRAWN, generator(5), REAL)
    parts = engine.sample(PROMPTS, DRAWN, generator(5), REAL, pause=Pause(tokens=3))
    rows = parts.running
    shorter = parts.lengths.clone()
    shorter[rows[::2]] = 2  # as an engine leaves them whose answers do not run in step
    parts = engine.sample(PROMPTS, DRAWN, generator(5), REAL, replace(parts, lengths=shorter))
    assert_same(parts, whole)


def test_partial_answers_go_on_under_other_weights_with_their_own_log_probs() -> None:
    engine = NativeEngine(TokenScorer(policy()).eval())
    engine.load(weights(1))
    parts = engine.sample(PROMPTS, DRAWN, generator(5), REAL, pause=Pause(tokens=3))
    engine.load(weights(0))
    whole = engine.sample(PROMPTS, DRAWN, generator(6), REAL, parts)
    torch.testing.assert_close(whole.log_probs[:, :3], parts.log_probs[:, :3], atol=0, rtol=0)
    expected = rescored(whole, DRAWN.answers_per_prompt, DRAWN.temperature)
    later = torch.arange(whole.tokens.shape[1]) >= 3
    torch.testing.assert_close(whole.log_probs[:, later], expected[:, later], atol=1e-4, rtol=0)
    assert (whole.log_probs[:, :3] - expected[:, :3]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["native", "transformers"])
def test_an_engine_that_does_not_take_the_weights_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that ignores an adapter or a tensor is caught at the sync, not weeks later."""
    engine = make_engine(replace(WORKLOAD.recipe("smoke"), engine=name), policy)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_: self)
    with pytest.raises(WeightsDiffer, match="version 4: the learner sent weights of digest"):
        engine.load(weights(1, version=4))


def test_a_vllm_that_is_not_there_is_named() -> None:
    if not NO_VLLM:
        pytest.skip("vLLM is installed")
    recipe = replace(WORKLOAD.recipe("smoke"), engine="vllm")
    with pytest.raises(UsageError, match="install vllm"):
        make_engine(recipe, policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "vllm", "min_p": 0.1}, "min_p: expected 0 with engine=vllm"),
        ({"partial_tokens": 4, "max_staleness": 0}, "max_staleness: expected at least 1"),
        ({"sample_deadline_s": 9.0, "max_staleness": 0}, "max_staleness: expected at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(WORKLOAD.recipe("smoke"), **change).check()
