"""The equations of T1: hand-computed cases and laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.t1 import objective
from algorithms.t1.objective import PolicyLoss

VALUES = st.floats(-10, 10, width=32)


@st.composite
def groups(draw: st.DrawFn, count: int = 1) -> list[Tensor]:
    prompts, answers = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    size = prompts * answers
    rows = [draw(st.lists(VALUES, min_size=size, max_size=size)) for _ in range(count)]
    return [torch.tensor(row).view(prompts, answers) for row in rows]


def test_leave_one_out_of_a_hand_computed_group() -> None:
    got = objective.leave_one_out(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0]]))


@settings(max_examples=60, deadline=None)
@given(groups())
def test_leave_one_out_is_each_value_less_the_mean_of_the_others(group: list[Tensor]) -> None:
    (values,) = group
    others = (values.sum(dim=1, keepdim=True) - values) / (values.shape[1] - 1)
    torch.testing.assert_close(
        objective.leave_one_out(values), values - others, atol=1e-4, rtol=1e-4
    )


@settings(max_examples=60, deadline=None)
@given(groups(2), st.floats(0, 1), VALUES, VALUES)
def test_advantages_sum_to_zero_and_ignore_constants(
    group: list[Tensor], beta: float, shift: float, other: float
) -> None:
    rewards, ratios = group
    got = objective.advantages(rewards, ratios, beta)
    torch.testing.assert_close(got.sum(dim=1), torch.zeros(len(got)), atol=1e-3, rtol=0)
    moved = objective.advantages(rewards + shift, ratios + other, beta)
    torch.testing.assert_close(moved, got, atol=1e-3, rtol=1e-3)


@settings(max_examples=60, deadline=None)
@given(groups(2), st.floats(0, 1), st.data())
def test_uncounted_answers_change_nothing(
    group: list[Tensor], beta: float, data: st.DataObject
) -> None:
    rewards, ratios = group
    size = rewards.numel()
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    counted = torch.tensor(flags).view_as(rewards)
    unknown = rewards.masked_fill(~counted, torch.nan)
    for kind in ("rloo", "grpo", "reinforce"):
        got = objective.advantages(unknown, ratios, beta, kind, counted)
        assert not got[~counted].any()
        for row, seen in enumerate(counted):
            values = rewards[row : row + 1, seen], ratios[row : row + 1, seen]
            if seen.sum() < 2:
                continue
            alone = objective.advantages(*values, beta, kind)[0]
            torch.testing.assert_close(got[row, seen], alone, atol=1e-3, rtol=1e-3)
    lonely = counted.sum(dim=1) < 2
    assert not objective.advantages(unknown, ratios, beta, "rloo", counted)[lonely].any()
    assert not objective.informative_groups(unknown, counted)[lonely].any()


def test_advantages_of_a_hand_computed_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    grpo = objective.group_advantages("grpo", rewards)
    deviation = math.sqrt(2 / 3)
    torch.testing.assert_close(grpo, rewards / deviation, atol=1e-5, rtol=0)
    assert torch.equal(objective.group_advantages("reinforce", rewards), rewards)
    flat = objective.group_advantages("grpo", torch.ones(2, 3))
    assert torch.equal(flat, torch.zeros(2, 3))


@settings(max_examples=60, deadline=None)
@given(groups(2), st.floats(0, 1))
def test_the_kl_term_is_part_of_the_reward_before_the_baseline(
    group: list[Tensor], beta: float
) -> None:
    rewards, ratios = group
    torch.testing.assert_close(
        objective.advantages(rewards, ratios, beta),
        objective.leave_one_out(rewards - beta * ratios),
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="K=1"):
        objective.leave_one_out(torch.zeros(3, 1))


def test_groups_without_a_difference_are_not_informative() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert objective.informative_groups(rewards).tolist() == [False, False, True, True]


def test_importance_weights_are_ratios_cut_at_the_cap() -> None:
    new = torch.tensor([0.5, 0.5, 0.5]).log().requires_grad_()
    old = torch.tensor([0.5, 1.0, 0.1]).log()
    weights = objective.importance_weights(new, old, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 2.0]))
    assert not weights.requires_grad


def test_the_clip_holds_back_what_moved_far_and_lets_it_return() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    gains = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    log_probs = ratios.log().requires_grad_()
    loss = PolicyLoss(entropy_coef=0.0, importance="clipped", clip_low=0.2, clip_high=0.3)
    value = loss.gains(log_probs, torch.zeros(5), gains)
    torch.testing.assert_close(value, torch.tensor([1.3, -1.5, 0.5, -0.8, 2.2]))
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.5, 0.5, 0.0, 2.2]))
    assert loss.is_cut(log_probs, torch.zeros(5)).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("importance", ["truncated", "clipped", "none"])
def test_every_correction_gives_the_policy_gradient_on_fresh_samples(
    importance: objective.Importance,
) -> None:
    log_probs = torch.tensor([-0.3, -1.0, -4.0], requires_grad=True)
    gains = torch.tensor([1.0, -0.5, 2.0])
    loss = PolicyLoss(entropy_coef=0.0, importance=importance)
    value = loss.gains(log_probs, log_probs.detach(), gains)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    torch.testing.assert_close(gradient, gains)
    assert not loss.is_cut(log_probs, log_probs.detach()).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_the_kl_in_the_loss_has_the_gradient_of_the_reverse_kl(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    log_p, reference = logits.requires_grad_().log_softmax(-1), other.log_softmax(-1)
    weights = log_p.exp().detach()  # the mean over samples, exactly
    estimates = {
        "k1": log_p - reference,
        "k2": objective.kl_estimates(log_p, reference),
        "k3": (reference - log_p).exp() - 1 + log_p - reference,
    }
    found = {
        name: torch.autograd.grad((weights * value).sum(), logits, retain_graph=True)[0]
        for name, value in estimates.items()
    }
    reverse = (log_p.exp() * (log_p - reference)).sum()
    forward = (reference.exp() * (reference - log_p)).sum()
    wanted = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (reverse, forward)]
    torch.testing.assert_close(found["k2"], wanted[0])
    torch.testing.assert_close(found["k3"], wanted[1])
    torch.testing.assert_close(found["k1"], torch.zeros(5, dtype=torch.float64))


def test_a_kl_in_the_loss_needs_the_anchor() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"kl_coef=0.1, found none"):
        PolicyLoss(entropy_coef=0.0, kl_coef=0.1)(one, one, one, one, one)


@pytest.mark.parametrize(
    ("norm", "shares"),
    [("token", [0.25, 0.25]), ("sequence", [0.5, 1 / 6]), ("constant", [0.05, 0.05])],
)
def test_token_shares_of_two_answers(norm: objective.LossNorm, shares: list[float]) -> None:
    loss = PolicyLoss(entropy_coef=0.0, norm=norm, constant_tokens=10.0)
    got = loss.token_shares(torch.tensor([1, 3]), tokens=4, answers=2)
    torch.testing.assert_close(got, torch.tensor(shares, dtype=torch.float64))


def test_the_policy_loss_of_a_hand_computed_batch() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropies = torch.tensor([0.5, 1.5], requires_grad=True)
    sampled, gains, shares = (torch.tensor(v) for v in ([-1.0, -2.0], [2.0, -1.0], [0.5, 0.5]))
    loss = PolicyLoss(entropy_coef=0.1)(log_probs, entropies, sampled, gains, shares)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 * (-2.0 + 0.05) + 0.5 * (2.0 + 0.15)))
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.0, 0.5]))
    torch.testing.assert_close(entropies.grad, torch.tensor([-0.05, -0.05]))


def test_the_policy_gradient_of_a_bandit_raises_the_rewarded_arm_and_entropy() -> None:
    logits = torch.zeros(3, requires_grad=True)
    log_p = logits.log_softmax(-1)
    advantages = objective.leave_one_out(torch.tensor([[1.0, 0.0, 0.0]])).flatten()
    entropy = -(log_p.exp() * log_p).sum().expand(3)
    shares = torch.full((3,), 1 / 3)
    loss = PolicyLoss(entropy_coef=0.0)(log_p, entropy, log_p.detach(), advantages, shares)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.tensor([-1 / 3, 1 / 6, 1 / 6]))


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_losses_of_micro_batches_add_up(norm: objective.LossNorm) -> None:
    loss = PolicyLoss(entropy_coef=0.01, norm=norm, constant_tokens=7.0)
    lengths = torch.tensor([2, 3, 1])
    owners = torch.repeat_interleave(torch.arange(3), lengths)
    shares = loss.token_shares(lengths, tokens=6, answers=3)[owners]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(6, generator=generator).double() for _ in range(4)]
    whole = loss(*parts, shares)
    split = sum(
        loss(*(part[piece] for part in parts), shares[piece])
        for piece in (slice(0, 2), slice(2, 6))
    )
    torch.testing.assert_close(whole, split)


def test_sums_by_answer() -> None:
    got = objective.sum_by_answer(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3)
    assert got.tolist() == [3.0, 0.0, 4.0]


def test_the_supervised_loss_is_the_mean_negative_log_probability() -> None:
    log_probs = torch.tensor([0.5, 0.25]).log()
    assert objective.supervised_loss(log_probs, 2.0).item() == pytest.approx(1.5 * math.log(2))


@settings(max_examples=30, deadline=None)
@given(decay=st.floats(0, 1), values=st.lists(VALUES, min_size=2, max_size=2))
def test_the_anchor_is_an_exponential_mean(decay: float, values: list[float]) -> None:
    anchor, policy = [torch.tensor([values[0]])], [torch.tensor([values[1]])]
    objective.update_anchor(anchor, policy, decay)
    expected = decay * values[0] + (1 - decay) * values[1]
    assert anchor[0].item() == pytest.approx(expected, abs=1e-4)
    assert policy[0].item() == values[1]


def test_a_decay_of_one_freezes_the_anchor_and_of_zero_copies_the_policy() -> None:
    frozen, copied, policy = [torch.ones(2)], [torch.ones(2)], [torch.full((2,), 0.3)]
    objective.update_anchor(frozen, policy, 1.0)
    objective.update_anchor(copied, policy, 0.0)
    assert torch.equal(frozen[0], torch.ones(2))
    assert torch.equal(copied[0], policy[0])


def test_a_wrong_anchor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found 1.5"):
        objective.update_anchor([], [], 1.5)
    with pytest.raises(ValueError, match="found 1 and 0"):
        objective.update_anchor([torch.ones(1)], [], 0.5)
