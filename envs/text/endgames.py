"""Chess endgames: king and queen, or king and rook, against a lone king.

White to move, in FEN with a space between all signs; a move is a piece and a square, ``Q h 5``,
with ``+`` or ``#`` behind it or not. Checkmate earns 1, a move that is none loses 1 and changes
nothing, all else earns 0; stalemate, a lost piece and the limit of moves end the game. Black is
played by an exact solver made by going back from the mates, or by Stockfish where it is installed
(the extra ``chess``). The paper has two further endgames and its Stockfish at every game.

Squares are 0..63, a1 first, h8 last. A position is (white king, white piece, black king).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol, cast, runtime_checkable

import numpy as np

from envs.text.game import (
    NEWLINE,
    PAD,
    Bools,
    Floats,
    Ints,
    Normaliser,
    Recording,
    Tokens,
    Turn,
    Words,
    record,
    widened,
)

Piece = Literal["Q", "R"]
PIECES: Final[tuple[Piece, ...]] = ("Q", "R")
MAX_MOVES: Final = 50
LEAST_MATE: Final = 15
"""Plies to mate from which a position is held out for scoring; the others train."""
NEVER: Final = 255
"""Plies to mate of what is no forced mate."""
RANDOM_SHARE: Final = 0.3
"""Of the data's moves; the others are the solver's."""
_KING: Final = tuple((r, f) for r in (-1, 0, 1) for f in (-1, 0, 1) if (r, f) != (0, 0))
_ROOK: Final = ((0, 1), (1, 0), (0, -1), (-1, 0))
_ALL: Final = np.arange(64)

Depths = np.ndarray
"""uint8 plies to mate."""


@cache
def king_moves() -> Bools:
    """Returns which squares a king reaches from each, [64, 64]."""
    ranks, files = np.divmod(_ALL, 8)
    far = np.maximum(np.abs(ranks[:, None] - ranks[None]), np.abs(files[:, None] - files[None]))
    return far == 1


@cache
def attacks(piece: Piece) -> Bools:
    """Returns the squares that a piece attacks past the white king, [white king, piece, square].

    The black king hides nothing: it cannot flee along the line that checks it.
    """
    found = np.zeros((64, 64, 64), np.bool_)
    for rank_step, file_step in _KING if piece == "Q" else _ROOK:
        for start in range(64):
            rank, file = divmod(start, 8)
            free = np.ones(64, np.bool_)  # of white kings that have not blocked this line yet
            while 0 <= (rank := rank + rank_step) < 8 and 0 <= (file := file + file_step) < 8:
                square = 8 * rank + file
                free[square] = False
                found[free, start, square] = True
    return found


@dataclass(frozen=True, slots=True)
class Solution:
    """Plies until mate with best play, [white king, piece, black king]; ``NEVER`` for none."""

    white: Depths
    """White to move; ``NEVER`` also for positions that cannot be."""
    black: Depths
    """Black to move; 0 is checkmate."""
    replies: Bools
    """[8, ...]: whether black's king may take each of its steps."""


def _stepped(step: tuple[int, int]) -> tuple[Ints, Bools]:
    """Returns where a king's step leads from each square, and whether it stays on the board."""
    ranks, files = np.divmod(_ALL, 8)
    to_rank, to_file = ranks + step[0], files + step[1]
    fine = (to_rank >= 0) & (to_rank < 8) & (to_file >= 0) & (to_file < 8)
    return np.where(fine, 8 * to_rank + to_file, _ALL), fine


@cache
def solve(piece: Piece) -> Solution:
    """Solves the endgame by going back from the checkmates."""
    beaten, near = attacks(piece), king_moves()
    king, own, lone = np.ix_(_ALL, _ALL, _ALL)
    apart = (king != own) & (king != lone) & (own != lone) & ~near[:, None, :]
    near_own = near[:, :, None]
    targets = [_stepped(step) for step in _KING]
    replies = np.stack(
        [
            fine
            & apart
            & ~near[:, None, to]
            & ((king != to) & np.where(own == to, ~near_own, ~beaten[:, :, to]))
            for to, fine in targets
        ]
    )
    moves = replies.any(axis=0)
    black = np.full((64, 64, 64), NEVER, np.uint8)
    black[apart & beaten & ~moves] = 0
    possible = apart & ~beaten
    white = np.full((64, 64, 64), NEVER, np.uint8)
    while True:
        best = np.minimum(_best_of_piece(black, beaten), _best_of_king(black))
        found = np.where(possible & (best < NEVER), best + 1, NEVER).astype(np.uint8)
        if np.array_equal(found, white):
            return Solution(white, black, replies)
        white = found
        # capturing leads to king against king, which is no mate
        worst = np.zeros((64, 64, 64), np.uint8)
        for reply, (to, _) in zip(replies, targets, strict=True):
            after = np.where(own == to, NEVER, white[:, :, to])
            worst = np.where(reply, np.maximum(worst, after), worst)
        black = np.where(apart & moves & (worst < NEVER), worst + 1, black).astype(np.uint8)


def _best_of_piece(black: Depths, beaten: Bools) -> Depths:
    best = np.full((64, 64, 64), NEVER, np.uint8)
    for to in range(64):
        can = beaten[:, :, to, None]
        np.minimum(best, np.where(can, black[:, to, None, :], NEVER), out=best)
    return best


def _best_of_king(black: Depths) -> Depths:
    best = np.full((64, 64, 64), NEVER, np.uint8)
    for step in _KING:
        to, fine = _stepped(step)
        np.minimum(best, np.where(fine[:, None, None], black[to], NEVER), out=best)
    return best


def best_moves(piece: Piece, positions: Ints) -> tuple[Ints, Ints]:
    """Returns one fastest move for white in each position [B, 3]: (is the king's, square)."""
    moves = _white_moves(piece, positions)
    king, own, lone = positions.T
    black = solve(piece).black
    by_piece = black[king[:, None], _ALL, lone[:, None]]
    by_king = black[_ALL, own[:, None], lone[:, None]]
    depths = np.stack([by_piece, by_king], axis=1).astype(np.int64)
    flat = np.where(moves, depths, NEVER + 1).reshape(-1, 128)
    return np.divmod(flat.argmin(axis=1), 64)


def _white_moves(piece: Piece, positions: Ints) -> Bools:
    """Returns the legal moves of the piece and of the king, [B, 2, 64]."""
    king, own, lone = positions.T
    squares = np.broadcast_to(_ALL, (len(positions), 64))
    free = (squares != king[:, None]) & (squares != own[:, None]) & (squares != lone[:, None])
    near = king_moves()
    by_piece = attacks(piece)[king, own] & free
    by_king = near[king] & ~near[lone] & free
    return np.stack([by_piece, by_king], axis=1)


@runtime_checkable
class Opponent(Protocol):
    """Plays black."""

    def reply(self, piece: Piece, positions: Ints, rng: np.random.Generator) -> Ints:
        """Returns where black's king goes in each position [B, 3]; every one has a legal step."""
        ...


class ExactOpponent:
    """Takes a loose piece, else delays the mate as long as it can; equals are drawn."""

    def reply(self, piece: Piece, positions: Ints, rng: np.random.Generator) -> Ints:
        """Returns the squares, [B]."""
        solution = solve(piece)
        king, own, lone = positions.T
        to = np.stack([_stepped(step)[0][lone] for step in _KING])
        legal = solution.replies[:, king, own, lone]
        after = np.where(own == to, NEVER, solution.white[king, own, to]).astype(np.float64)
        chosen = np.where(legal, after + rng.random(after.shape) / 2, -1).argmax(axis=0)
        return to[chosen, np.arange(len(positions))]


class Endgames:
    """A batch of games; a case is a position's number, 0..2 * 64**3."""

    action_tokens = 5
    max_turns = MAX_MOVES
    goal = 1.0
    message_tokens = 36
    normaliser = Normaliser(least=-1, average=0.586, best=1)

    def __init__(self, opponent: Opponent | None = None) -> None:
        self._opponent = opponent or ExactOpponent()
        signs = [*"abcdefgh", *"12345678", *"KQRk", "/", "w", "-", "+", "#"]
        self.words = Words(signs)
        self._squares = [
            self.words.encode(f"{'abcdefgh'[square % 8]} {square // 8 + 1}") for square in range(64)
        ]

    def cases(self) -> Ints:
        """Returns the held-out positions: those with the longest mates of both endgames."""
        return _positions(held_out=True)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draws positions that are not held out."""
        return rng.choice(_positions(held_out=False), count)

    def reset(self, cases: Ints, seed: int) -> Turn:
        """Sets up the positions; black's draws follow from the seed."""
        self._rng = np.random.default_rng(seed)
        kinds, codes = np.divmod(cases, 64**3)
        self.kinds = kinds
        """Number of each game's piece in ``PIECES``, [B]."""
        self.positions = np.stack([codes // 4096, codes // 64 % 64, codes % 64], axis=1)
        """White king, white piece, black king of each game, [B, 3]."""
        self._done = np.zeros(len(cases), np.bool_)
        self._turns = 0
        return self._turn(np.zeros(len(cases), np.float32), self._done.copy())

    def step(self, actions: Tokens) -> Turn:
        """Plays white's moves and black's replies."""
        moves = np.array([self._read(action) for action in actions.tolist()])
        rewards = np.zeros(len(actions), np.float32)
        invalid = np.zeros(len(actions), np.bool_)
        self._turns += 1
        for kind, piece in enumerate(PIECES):
            games = np.flatnonzero((self.kinds == kind) & ~self._done)
            if not len(games):
                continue
            movers, squares = moves[games].T
            legal = _white_moves(piece, self.positions[games])
            kings = movers == PIECES.index(piece) + 1
            known = (movers == 0) | kings
            fine = known & legal[np.arange(len(games)), np.where(movers == 0, 1, 0), squares]
            invalid[games] = ~fine
            rewards[games[~fine]] = -1
            played, who = games[fine], np.where(movers[fine] == 0, 0, 1)
            self.positions[played, who] = squares[fine]
            rewards[played] = self._answer(piece, played)
        if self._turns == MAX_MOVES:
            self._done[:] = True
        return self._turn(rewards, invalid)

    def _answer(self, piece: Piece, games: Ints) -> Floats:
        """Lets black reply and ends games; returns white's rewards."""
        solution = solve(piece)
        king, own, lone = self.positions[games].T
        mated = solution.black[king, own, lone] == 0
        stuck = ~solution.replies[:, king, own, lone].any(axis=0)
        self._done[games[stuck]] = True
        going = games[~stuck]
        if len(going):
            to = self._opponent.reply(piece, self.positions[going], self._rng)
            self._done[going[to == self.positions[going, 1]]] = True
            self.positions[going, 2] = to
        return mated.astype(np.float32)

    def _read(self, action: list[int]) -> tuple[int, int]:
        """Returns (0 king, 1 queen, 2 rook; square), or (-1, 0) for what is no move."""
        words = [self.words.words[token] for token in action if token != PAD]
        if len(words) == 5 and words[3] in "+#":
            del words[3]
        if len(words) != 4 or words[0] not in ("K", "Q", "R") or words[3] != "\n":
            return -1, 0
        if words[1] not in tuple("abcdefgh") or words[2] not in tuple("12345678"):
            return -1, 0
        return "KQR".index(words[0]), "abcdefgh".index(words[1]) + 8 * (int(words[2]) - 1)

    def fen(self, game: int) -> str:
        """Returns the position with a space between its signs, as a player reads it."""
        signs = dict(zip(cast("list[int]", self.positions[game].tolist()), "K?k", strict=True))
        ranks: list[str] = []
        for rank in range(7, -1, -1):
            row, empty = "", 0
            for file in range(8):
                sign = signs.get(8 * rank + file)
                if sign is None:
                    empty += 1
                    continue
                row, empty = f"{row}{empty or ''}{sign}", 0
            ranks.append(f"{row}{empty or ''}")
        board = "/".join(ranks).replace("?", PIECES[int(self.kinds[game])])
        return f"{' '.join(board)} w\n"

    def _turn(self, rewards: Floats, invalid: Bools) -> Turn:
        texts = ["" if done else self.fen(game) for game, done in enumerate(self._done.tolist())]
        messages = widened(self.words.table(texts), self.message_tokens)
        return Turn(messages, True, rewards, self._done.copy(), invalid)

    def move(self, game: int, king: bool, square: int) -> Tokens:
        """Returns the tokens of a move, [5]."""
        mover = self.words.encode("K" if king else PIECES[int(self.kinds[game])])
        said = [*mover, *self._squares[square], NEWLINE, PAD]
        return np.array(said, np.int16)

    def behave(self, rng: np.random.Generator, count: int) -> Recording:
        """Moves at random with a chance of 30 %, else as the solver does."""

        def act(turn: Turn) -> Tokens:
            actions = np.zeros((count, self.action_tokens), np.int16)
            for kind, piece in enumerate(PIECES):
                games = np.flatnonzero((self.kinds == kind) & ~turn.done)
                if not len(games):
                    continue
                moves = _white_moves(piece, self.positions[games]).reshape(len(games), -1)
                random = (rng.random(moves.shape) * moves).argmax(axis=1)
                kings, squares = best_moves(piece, self.positions[games])
                best = 64 * kings + squares
                chosen = np.where(rng.random(len(games)) < RANDOM_SHARE, random, best)
                for game, one in zip(games, chosen, strict=True):
                    actions[game] = self.move(int(game), bool(one >= 64), int(one) % 64)
            return actions

        return record(self, self.draw(rng, count), int(rng.integers(2**31)), act)


@cache
def _positions(held_out: bool) -> Ints:
    """Returns the numbers of winnable positions of both endgames, long mates or the others."""
    found: list[Ints] = []
    for kind, piece in enumerate(PIECES):
        depths = solve(piece).white.reshape(-1)
        longest = int(depths[depths < NEVER].max())
        # the paper holds out mates of 15 moves and more, which K+Q does not have
        least = min(longest - 1, 2 * LEAST_MATE - 1)
        chosen = (depths >= least) if held_out else (depths < least)
        found.append(np.flatnonzero(chosen & (depths < NEVER)) + kind * 64**3)
    return np.concatenate(found)
