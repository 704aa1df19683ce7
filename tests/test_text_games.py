"""The text games of LMRL-Gym: the paper's constants, the rules, and what their data are like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.text import endgames, maze, wordle
from envs.text.endgames import Endgames
from envs.text.game import PAD, Game, Normaliser, Recording, TextEpisode, squeeze
from envs.text.maze import Maze
from envs.text.text_nav import EXITS, THINGS, House, TextNav, commands, describe
from envs.text.wordle import Wordle
from envs.text.wordle_words import WORDS

GAMES = {
    "maze_fo": Maze,
    "maze_po": lambda: Maze(partial=True, history=2),
    "text_nav_fo": TextNav,
    "text_nav_po": lambda: TextNav(partial=True),
    "wordle": Wordle,
    "endgames": Endgames,
}


def game_of(name: str) -> Game:
    return GAMES[name]()


# ---------------------------------------------------------------------------- all games


@pytest.mark.parametrize("name", GAMES)
def test_equal_generators_give_equal_data_and_every_episode_ends(name):
    first, second = (game_of(name).behave(np.random.default_rng(3), 40) for _ in range(2))
    for array in ("messages", "fresh", "actions", "rewards", "alive"):
        np.testing.assert_array_equal(getattr(first, array), getattr(second, array))
    game = game_of(name)
    assert first.lengths.max() <= game.max_turns
    assert first.messages.shape[2] == game.message_tokens
    assert first.actions.shape[2] == game.action_tokens
    assert first.actions.max() < len(game.words)


@pytest.mark.parametrize("name", GAMES)
def test_ended_episodes_say_nothing_and_earn_nothing(name):
    played = game_of(name).behave(np.random.default_rng(5), 40)
    assert (played.messages[~played.alive] == PAD).all()
    assert (played.rewards[~played.alive] == 0).all()
    assert (played.messages[played.alive][:, 0] != PAD).all()


@pytest.mark.parametrize("name", GAMES)
def test_every_word_that_is_said_can_be_read_back(name):
    game = game_of(name)
    played = game.behave(np.random.default_rng(1), 8)
    for rows in (played.messages, played.actions):
        for tokens in rows[played.alive][:50]:
            text = game.words.decode(tokens)
            assert text.endswith("\n")
            assert "?" not in text
            np.testing.assert_array_equal(game.words.encode(text), tokens[tokens != PAD])


@pytest.mark.parametrize("name", [name for name in GAMES if name != "endgames"])
def test_a_single_episode_plays_as_its_row_in_a_batch(name):
    """In the endgames black's draws belong to the batch."""
    played = game_of(name).behave(np.random.default_rng(4), 3)
    cases = game_of(name).draw(np.random.default_rng(9), 3)
    one, many = game_of(name), game_of(name)
    alone, batch = one.reset(cases[1:2], 0), many.reset(cases, 0)
    for actions in played.actions[:5]:
        np.testing.assert_array_equal(alone.messages[0], batch.messages[1])
        alone, batch = one.step(actions[1:2]), many.step(actions)
        assert (alone.rewards[0], alone.done[0]) == (batch.rewards[1], batch.done[1])


def test_a_wrong_text_is_an_invalid_action_whatever_its_length():
    episode = TextEpisode(Maze())
    episode.reset(0)
    for text in ("", "\n", "move\n", "move up", "jump\n", "move up\nmove up\n", "sesame " * 9):
        assert episode.step(text)[1] == -4


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=6))
def test_squeezing_keeps_the_order_of_tokens(rows):
    tokens = np.array(rows, np.int16)
    squeezed, places = squeeze(tokens, np.arange(tokens.size).reshape(tokens.shape))
    for row, (kept, at) in enumerate(zip(squeezed, places, strict=True)):
        wanted = tokens[row][tokens[row] != PAD]
        np.testing.assert_array_equal(kept[: len(wanted)], wanted)
        assert (kept[len(wanted) :] == PAD).all()
        np.testing.assert_array_equal(tokens.ravel()[at[: len(wanted)]], wanted)


def test_the_normaliser_gives_the_papers_scores():
    maze_fo = Maze().normaliser
    assert maze_fo(-6.97) == pytest.approx(99.9, abs=0.05)
    assert maze_fo(-72.1) == pytest.approx(57.2, abs=0.1)  # the paper prints 58.2
    assert Maze(partial=True).normaliser(-52.9) == pytest.approx(76.3, abs=0.05)
    assert Wordle().normaliser(-2.81) == pytest.approx(80.0, abs=0.1)
    assert TextNav().normaliser(0.88) == pytest.approx(91.9, abs=0.1)
    assert Normaliser(0, 1, 3)(0.5) == 25
    assert Normaliser(0, 1, 3)(2) == 75


# ---------------------------------------------------------------------------- maze


def test_the_mean_optimal_return_of_the_maze_is_the_papers():
    starts = Maze().cases()
    assert (len(maze.CELLS), len(starts)) == (26, 25)
    assert maze.CELLS[maze.GOAL] == (8, 6)
    assert -(maze.distances()[starts] - 1).mean() == pytest.approx(-6.84, abs=1e-9)
    game = Maze()
    turn = game.reset(starts, 0)
    total = np.zeros(25)
    while not turn.done.all():
        turn = game.step(game.actions[maze.solution()[game.cells]])
        total += turn.rewards
    assert total.mean() == pytest.approx(-6.84, abs=1e-6)


def test_a_player_that_never_arrives_gets_the_papers_least_return():
    game = Maze()
    turn = game.reset(np.array([0]), 0)
    rewards = []
    while not turn.done[0]:
        turn = game.step(game.actions[[2]])  # up, into the wall
        rewards.append(turn.rewards[0])
    assert (len(rewards), sum(rewards)) == (101, -101)


def test_the_last_step_is_free_and_nonsense_costs_four():
    episode = TextEpisode(Maze())
    game = Maze()
    turn = game.reset(np.array([maze.CELLS.index((7, 6))]), 0)
    assert not turn.done[0]
    after = game.step(game.actions[[3]])
    assert (after.rewards[0], after.done[0]) == (0, True)
    assert "position 8, 6." in episode.reset(0)
    assert episode.step("fly\n")[1:] == (-4, False)


def test_the_partial_mazes_context_is_cut_to_its_last_turns_and_goes_on():
    game = Maze(partial=True, history=3)
    played = game.behave(np.random.default_rng(0), 20)
    assert np.flatnonzero(played.fresh).tolist() == [0, *range(6, len(played.fresh), 3)]
    row = int(played.lengths.argmax())
    said = [message[message != PAD] for message in played.messages[:, row]]
    heard = []
    for turn in range(3, 6):
        heard += [*said[turn], *played.actions[turn, row]]
    np.testing.assert_array_equal(said[6][: len(heard)], heard)


def test_no_episode_of_the_data_crosses_from_an_arm_to_the_goal():
    game = Maze()
    played = game.behave(np.random.default_rng(2), 300)
    goal = played.ended & (played.rewards[played.lengths - 1, range(300)] == 0)
    rows = [int(game.words.decode(row).split("position ")[3][0]) for row in played.messages[0]]
    assert goal.any()
    assert not (goal & (np.array(rows) < 5)).any()


# ---------------------------------------------------------------------------- wordle


def answer(guess: str, hidden: str, duplicates: str) -> str:
    code = wordle.feedback(duplicates)[WORDS.index(guess), WORDS.index(hidden)]
    return "".join("byg"[code // 3**place % 3] for place in range(4, -1, -1))


def test_the_list_has_four_hundred_words_of_five_letters():
    assert len(set(WORDS)) == 400
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in WORDS)
    assert list(WORDS) == sorted(WORDS)


def test_feedback_counts_copies_and_the_papers_does_not():
    assert answer("sheet", "sheet", "true") == "ggggg"
    assert answer("sheet", "heart", "true") == "byybg"
    assert answer("sheet", "heart", "paper") == "byyyg"
    assert answer("cheek", "begin", "true") == "bbybb"
    assert answer("cheek", "begin", "paper") == "bbyyb"


@given(st.integers(0, 399), st.integers(0, 399))
def test_the_hidden_word_always_fits_its_own_feedback(guess, hidden):
    for duplicates in ("true", "paper"):
        code = wordle.feedback(duplicates)[guess, hidden]
        assert (code == 3**5 - 1) == (guess == hidden)
        assert wordle.feedback(duplicates)[guess][hidden] == code


@pytest.mark.parametrize("duplicates", ["true", "paper"])
def test_the_scripted_policy_reaches_its_bound(duplicates):
    """The paper's list gives -1.94; ours is another list."""
    assert wordle.scripted_return(duplicates) == pytest.approx(-1.8775)


def test_wordle_ends_after_six_guesses_and_tells_nothing_of_a_wrong_word():
    game = Wordle()
    episode = TextEpisode(game)
    assert episode.reset(0) == "Wordle:\n"
    for turn in range(6):
        told, reward, done = episode.step("q q q q q\n")
        assert (told, reward, done) == ("\n" if turn < 5 else "", -1, turn == 5)


def test_wordles_data_are_like_the_papers():
    played = Wordle().behave(np.random.default_rng(0), 3000)  # in two parts
    found = (played.rewards == 0) & played.alive
    assert played.lengths.mean() == pytest.approx(4.82, abs=0.15)
    assert found.any(axis=0).mean() == pytest.approx(0.70, abs=0.04)
    assert played.returns.mean() == pytest.approx(-4.12, abs=0.15)


# ---------------------------------------------------------------------------- text-nav


def test_exits_of_the_house_lead_back():
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}
    for room, ways in EXITS.items():
        for way, other in ways.items():
            assert EXITS[other][back[way]] == room


def test_the_walkthrough_wins_and_eating_the_food_loses():
    game = TextNav()
    episode = TextEpisode(game)
    game_start = game.reset(np.array([3]), 0)
    assert "living room" in game.words.decode(game_start.messages[0])
    way = [
        "take stale food from table",
        "go west",
        "go west",
        "open fridge",
        "insert stale food into fridge",
        "close fridge",
    ]
    for text in way:
        told, reward, done = episode.step(f"{text}\n")
    assert (told, reward, done) == ("", 1, True)
    game.reset(np.array([3]), 0)
    episode.step("take stale food from table\n")
    assert episode.step("eat stale food\n")[1:] == (0, True)


def test_partial_observation_hides_room_and_load():
    house = House("kitchen", ("carried",) * 7)
    assert "You are in the kitchen" in describe(house, False)
    assert "carried: stale food" in describe(house, False)
    for hidden in ("kitchen", "carried"):
        assert hidden not in describe(house, True)


def test_commands_make_at_most_one_change_to_the_house():
    house = House("living room", tuple(THINGS.values()))
    seen, frontier = {house}, [house]
    while frontier and len(seen) < 500:
        before = frontier.pop()
        for after in commands(before).values():
            moved = sum(a != b for a, b in zip(before.places, after.places, strict=True))
            changes = (before.room != after.room) + moved + (before.open != after.open)
            assert changes == 1
            if after not in seen:
                seen.add(after)
                frontier.append(after)


# ---------------------------------------------------------------------------- endgames


@pytest.mark.parametrize(
    ("piece", "positions", "longest"), [("Q", 144_508, 19), ("R", 175_168, 31)]
)
def test_the_solver_agrees_with_the_known_tables(piece, positions, longest):
    """Legal positions with white to move; mate in 10 and in 16 at the latest, in plies."""
    depths = endgames.solve(piece).white
    won = depths[depths < endgames.NEVER]
    assert (len(won), won.max()) == (positions, longest)


def test_the_solver_mates_in_exactly_the_plies_it_says():
    game = Endgames()
    cases = np.random.default_rng(0).choice(game.cases(), 60)
    turn = game.reset(cases, 1)
    plies = np.array(
        [
            endgames.solve(endgames.PIECES[kind]).white[tuple(position)]
            for kind, position in zip(game.kinds, game.positions, strict=True)
        ]
    )
    moves = np.zeros(60, int)
    total = np.zeros(60)
    while not turn.done.all():
        actions = np.zeros((60, 5), np.int16)
        for kind, piece in enumerate(endgames.PIECES):
            games = np.flatnonzero((game.kinds == kind) & ~turn.done)
            kings, squares = endgames.best_moves(piece, game.positions[games])
            for one, king, square in zip(games, kings, squares, strict=True):
                actions[one] = game.move(int(one), bool(king), int(square))
        moves += ~turn.done
        turn = game.step(actions)
        total += turn.rewards
    np.testing.assert_array_equal(total, 1)
    np.testing.assert_array_equal(2 * moves - 1, plies)


def test_an_illegal_move_costs_one_and_changes_nothing():
    episode = TextEpisode(Endgames())
    position = episode.reset(3)
    for text in ("K z 9\n", "e 4\n", "Q\n", "N c 3\n"):
        assert episode.step(text) == (position, -1, False)


def test_held_out_positions_are_not_drawn():
    game = Endgames()
    assert not np.isin(game.draw(np.random.default_rng(0), 5000), game.cases()).any()


def test_a_recording_that_is_cut_ends_nowhere():
    shape = (4, 2)
    played = Recording(
        messages=np.ones((*shape, 1), np.int16),
        fresh=np.ones(4, bool),
        actions=np.ones((*shape, 1), np.int16),
        rewards=np.ones(shape, np.float32),
        alive=np.ones(shape, bool),
        cut=np.array([2, 9]),
    )
    assert played.lengths.tolist() == [2, 4]
    assert played.ended.tolist() == [False, True]
    assert played.returns.tolist() == [2, 4]
