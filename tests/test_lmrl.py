"""LMRL-Gym's methods: tokens stay what was sampled, and each equation gives what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.lmrl.games import Playing, make_game
from algorithms.lmrl.model import Agent, Policy, agent
from algorithms.lmrl.objective import (
    IlqlLoss,
    TokenValues,
    discounted,
    expectile_loss,
    generalised_advantages,
    imitation_loss,
    mc_loss,
    next_values,
    ppo_loss,
)
from algorithms.lmrl.player import Player
from algorithms.lmrl.roles import best, successes
from algorithms.lmrl.rows import Batch, Rows, recording
from algorithms.lmrl.workload import WORKLOAD, LmrlRecipe
from envs.text.game import NEWLINE, PAD, Recording
from heliostat import Weights, launch
from heliostat.actors.environment import Job, play
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Hosts, Layout
from heliostat.tracker import read_metrics

CPU = torch.device("cpu")
TINY = replace(
    WORKLOAD.recipe("smoke"),
    hidden=32,
    layers=1,
    feed_forward=32,
    episodes=40,
    batch=6,
    bc_steps=3,
    steps=3,
    warm_steps=2,
    rollouts=6,
    rollouts_per_job=3,
    eval_every=2,
    eval_cases=3,
    eval_repeats=1,
    test_cases=3,
    test_repeats=1,
    checkpoint_every=2,
    history=2,
)
GAMES = ("maze_fo", "maze_po", "text_nav_fo", "text_nav_po", "wordle", "endgames")


def tiny(**changes: object) -> LmrlRecipe:
    return replace(TINY, **changes)


def speaking(recipe: LmrlRecipe) -> tuple[Agent, Weights]:
    """An agent that often says a line's end, so that actions of every length occur."""
    game = make_game(recipe)
    models = agent(recipe, len(game.words), seed=1)
    with torch.no_grad():
        models.policy.head.weight[NEWLINE] += 0.05
    return models, Weights.of_tensors(models.state_dict(), version=3)


# ---------------------------------------------------------------------------- token in, token out


@pytest.mark.parametrize("game", GAMES)
def test_the_ids_that_were_sampled_are_the_ids_that_are_learnt_from(game):
    """Thread 21: no turn's end is dropped, and log-probs belong to the tokens they stand by."""
    recipe = tiny(game=game, method="ppo")
    made = make_game(recipe)
    models, weights = speaking(recipe)
    cases = made.draw(np.random.default_rng(0), 5)
    player = Player(agent(recipe, len(made.words), 0), made)
    episodes = play(Playing(made), player, Job(cases, 7), weights)
    assert episodes.version == 3
    rows = Rows.of(recording(episodes), 0.99, episodes["log_probs"])
    said = rows.tokens[rows.chosen]
    alive = np.moveaxis(episodes["alive"], 0, 1)
    actions = np.moveaxis(episodes["action"], 0, 1)[alive]
    np.testing.assert_array_equal(said, actions[actions != PAD])
    np.testing.assert_array_equal(
        rows.log_probs, np.moveaxis(episodes["log_probs"], 0, 1)[alive][actions != PAD]
    )
    batch = Batch.of(rows, CPU)
    again = models.policy(batch.tokens, batch.chosen)[batch.where]
    np.testing.assert_allclose(again.detach().numpy(), rows.log_probs, atol=1e-4)


def test_a_continued_context_holds_every_message_and_action_in_turn():
    recipe = tiny(game="wordle")
    game = make_game(recipe)
    played = game.behave(np.random.default_rng(0), 6)
    rows = Rows.of(played, 1.0)
    assert len(rows.tokens) == 6
    for row in range(6):
        heard = []
        for turn in range(played.lengths[row]):
            heard += [t for t in played.messages[turn, row] if t] + [*played.actions[turn, row]]
        np.testing.assert_array_equal(rows.tokens[row][: len(heard)], heard)
        assert (rows.tokens[row][len(heard) :] == PAD).all()


def test_how_many_episodes_run_beside_one_changes_nothing_of_it():
    recipe = tiny(game="wordle")
    game = make_game(recipe)
    _, weights = speaking(recipe)
    player = Player(agent(recipe, len(game.words), 0), game)
    player.load(weights)
    seen = Playing(game).reset(np.arange(4), 0)
    alone = seen.copy()
    alone[1:, 1:] = PAD
    first = player.act(seen, torch.Generator().manual_seed(5))
    other = player.act(alone, torch.Generator().manual_seed(5))
    np.testing.assert_array_equal(first["action"][0], other["action"][0])
    assert (other["action"][1:] == PAD).all()


def test_padding_is_never_said():
    policy = Policy(TINY, 9)
    log_p = policy.log_probs(torch.randn(50, 32))
    assert log_p[:, PAD].max() < -1e6
    assert torch.allclose(log_p.exp().sum(dim=-1), torch.ones(50))


# ---------------------------------------------------------------------------- rows


def test_a_cut_episode_shows_the_state_in_which_it_goes_on_and_a_whole_one_ends():
    game = make_game(tiny())
    played = game.behave(np.random.default_rng(0), 30)
    rows = Rows.of(played, 0.99)
    for episode in range(30):
        mine = rows.owners == episode
        turns = played.lengths[episode]
        assert rows.counts[mine].sum() == 3 * turns
        assert (~rows.counts[mine]).sum() == (0 if played.ended[episode] else 3)
        assert rows.ended[mine].sum() == played.ended[episode]
        assert rows.rewards[mine].sum() == pytest.approx(played.returns[episode])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_chunks_count_every_token_once_and_keep_returns(size):
    game = make_game(tiny())
    rows = Rows.of(game.behave(np.random.default_rng(1), 12), 0.9)
    chunks = list(rows.chunks(size))
    for name in ("rewards", "returns"):
        counted = np.concatenate([getattr(chunk, name)[chunk.counts] for chunk in chunks])
        np.testing.assert_array_equal(counted, getattr(rows, name)[rows.counts])
    assert all(len(chunk.tokens) <= size + 1 for chunk in chunks)


def test_equal_rows_are_computed_once_and_stand_in_their_places():
    game = make_game(tiny())
    rows = Rows.of(game.behave(np.random.default_rng(2), 25), 0.9)
    batch = Batch.of(rows, CPU)
    assert len(batch.tokens) < len(rows.tokens) / 3
    said = batch.tokens[batch.chosen][batch.where]
    np.testing.assert_array_equal(said, rows.tokens[rows.chosen])


def test_passes_and_joins_change_no_sum():
    game = make_game(tiny())
    rows = Rows.of(game.behave(np.random.default_rng(3), 9), 0.9)
    policy = Policy(TINY, len(game.words))
    grads = []
    for count in (1, 4):
        policy.zero_grad()
        for part in (Rows.join([one]) for one in rows.split(count)):
            batch = Batch.of(part, CPU)
            shares = batch.counts / float(rows.counts.sum())
            imitation_loss(policy(batch.tokens, batch.chosen)[batch.where], shares).backward()
        grads.append(policy.head.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)


def test_filters_keep_successes_or_the_best_share():
    rewards = np.array([[-1, -1, -1, 0], [0, -1, -1, 0]], np.float32)
    alive = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
    one = np.ones((2, 4, 1), np.int16)
    played = Recording(one, np.ones(2, bool), one, rewards, alive)
    assert successes(played, 0.0).tolist() == [True, False, False, True]
    assert best(played, 0.0, 0.0).tolist() == [True, False, False, True]
    assert best(played, 0.0, 0.25).tolist() == [False, False, False, True]


# ---------------------------------------------------------------------------- equations


def test_the_expectile_weighs_over_and_underestimates():
    found = expectile_loss(torch.tensor([0.0, 0.0]), torch.tensor([2.0, -2.0]), 0.9)
    torch.testing.assert_close(found, torch.tensor([1.8, 0.2]))


def test_next_values_stop_at_an_end():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    ended = torch.tensor([False, True, False, True])
    assert next_values(values, ended).tolist() == [2, 0, 4, 0]


def test_ilql_backs_up_the_next_value_and_mc_the_return():
    zeros, ones = torch.zeros(2), torch.ones(2)
    shares = torch.tensor([1.0, 0.0])
    found = TokenValues(q1=zeros, q2=ones, v=torch.tensor([0.0, 5.0]), cql=ones)
    target = TokenValues(q1=ones * 3, q2=ones * 2, v=zeros, cql=zeros)
    rewards, ended = torch.tensor([-1.0, 0.0]), torch.tensor([False, True])
    # backup -1 + 0.5 * 5 = 1.5: (1.5² + 0.5²) / 2; V: 0.7 * 2² / 2; CQL 0.1
    loss = IlqlLoss(0.5, 0.7, 0.1)(found, target, rewards, ended, shares)
    assert float(loss) == pytest.approx(1.25 + 1.4 + 0.1)
    # (1² + 0² + 1²) / 2 + 0.1 with a return of 1
    assert float(mc_loss(found, ones, shares, 0.1)) == pytest.approx(1.1)


def test_the_cql_term_is_the_cross_entropy_of_both_q():
    heads = {"q1": torch.zeros(1, 4), "q2": torch.zeros(1, 4), "v": torch.zeros(1, 1)}
    found = TokenValues.of(heads, torch.tensor([2]), torch.tensor([0, 0]))
    torch.testing.assert_close(found.cql, torch.full((2,), 2 * float(np.log(4))))


def test_advantages_of_one_step_and_of_the_whole_episode():
    rewards, values = np.array([1.0, 2.0, 5.0]), np.array([0.5, 1.0, 2.0])
    owners = np.array([0, 0, 1])
    one = generalised_advantages(rewards, values, owners, 0.9, 0.0)
    np.testing.assert_allclose(one, [1 + 0.9 - 0.5, 2 - 1.0, 5 - 2.0])
    whole = generalised_advantages(rewards, values, owners, 0.9, 1.0)
    np.testing.assert_allclose(whole, discounted(rewards, owners, 0.9) - values)


def test_the_clipped_ratio_carries_no_gradient():
    old = torch.zeros(4)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    gains = torch.tensor([1.0, 1.0, -1.0, -1.0])
    ppo_loss(new, old, gains, torch.ones(4), 0.2).backward()
    assert (new.grad != 0).tolist() == [False, True, True, False]


def test_the_extracted_policy_is_the_imitated_one_bent_by_the_advantage():
    recipe = tiny(method="ilql")
    models = agent(recipe, 11, seed=0)
    states, valued = torch.randn(3, 32), torch.randn(3, 32)
    plain = models.policy.log_probs(states)
    torch.testing.assert_close(models.log_probs(states, valued), plain)
    models.beta.fill_(2.0)
    heads = models.critic.values(valued)
    bent = plain + 2 * (torch.minimum(heads["q1"], heads["q2"]) - heads["v"])
    torch.testing.assert_close(models.log_probs(states, valued), bent.log_softmax(dim=-1))


# ---------------------------------------------------------------------------- runs


def run(folder: Path, recipe: LmrlRecipe, **settings):
    return launch.create(
        Order(workload=WORKLOAD, spec="lmrl", recipe=recipe, folder=RunFolder(folder), **settings)
    )


@pytest.mark.parametrize("method", ["bc", "filtered_bc", "mc", "ppo", "online_filtered_bc"])
def test_every_method_trains_and_is_scored_before_and_after(tmp_path, method):
    outcome = run(tmp_path / "a", tiny(game="wordle", method=method, bc_weight=0.5))
    assert {"score", "return", "success", "bc_score", "bc_return"} <= outcome.metrics.keys()
    rows = [row for row in read_metrics(outcome.folder) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(np.isfinite(row["train/loss"]) for row in rows)
    if method == "ppo":
        assert max(row["train/drift"] for row in rows[3:]) < 1e-4


@pytest.mark.parametrize("game", ["wordle", "text_nav_fo"])
def test_every_game_can_be_learnt_by_ilql(tmp_path, game):
    outcome = run(tmp_path / "a", tiny(game=game, bc_steps=2, steps=2, episodes=12))
    assert np.isfinite(outcome.metrics["score"])


def test_methods_can_share_their_imitation(tmp_path):
    trunk = run(
        tmp_path / "trunk", tiny(game="wordle", method="bc", checkpoint_every=1, keep_checkpoints=9)
    )
    begin = (RunFolder(trunk.folder), 3)
    branch = run(tmp_path / "branch", tiny(game="wordle", method="ppo"), begin_from=begin)
    straight = run(tmp_path / "straight", tiny(game="wordle", method="ppo"))
    assert branch.metrics == straight.metrics


def test_members_and_readers_change_no_number(tmp_path):
    layout = Layout(
        data=Hosts(members=3), environment=Hosts(members=2), evaluation=Hosts(members=2)
    )
    recipe = tiny(game="wordle", method="ppo", bc_weight=1.0)
    first = run(tmp_path / "a", recipe)
    assert run(tmp_path / "b", replace(recipe, layout=layout)).metrics == first.metrics


def test_recipes_that_no_run_could_follow_are_refused():
    for recipe in (
        tiny(hidden=48),
        tiny(layout=replace(Layout.cluster(), parallelism="fsdp")),
        tiny(method="ppo", layout=replace(Layout.laptop(), learners=3)),
        tiny(passes=7),
    ):
        with pytest.raises(UsageError):
            recipe.check()
    for recipe in WORKLOAD.recipes.values():
        recipe.check()
