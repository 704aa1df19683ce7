"""Text-Nav: a house of eight rooms; put the stale food into the fridge and close it.

The reward is 1 for that and 0 for all else; eating the stale food loses; 15 commands are the most.
FO tells room, things, exits, what is carried and what may be done, and every turn is a context of
its own; PO leaves out room and what is carried, and the context is the whole episode. The paper's
house runs in TextWorld and its published environment cannot; this is the same house, with the same
things in the same places, written anew. Left out: looking and examining.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from envs.text.game import (
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

ROOMS: Final = (
    "bedroom",
    "bathroom",
    "office",
    "living room",
    "kitchen",
    "dining room",
    "garden",
    "backyard",
)
EXITS: Final = {
    "bedroom": {"west": "living room", "south": "bathroom"},
    "bathroom": {"north": "bedroom", "west": "office"},
    "office": {"north": "living room", "east": "bathroom"},
    "living room": {"east": "bedroom", "south": "office", "west": "dining room"},
    "dining room": {"east": "living room", "west": "kitchen"},
    "kitchen": {"east": "dining room", "north": "garden", "west": "backyard"},
    "garden": {"south": "kitchen"},
    "backyard": {"east": "kitchen"},
}
TABLES: Final = ("bedroom", "living room", "dining room")
CONTAINERS: Final = {"office": "chest", "kitchen": "fridge"}
THINGS: Final = {
    "stale food": "living room table",
    "fresh food": "living room table",
    "bowl": "bedroom table",
    "coffee cup": "dining room table",
    "plate": "dining room table",
    "utensils": "chest",
    "fruit": "fridge",
}
"""What there is -> where it is at first."""
FOOD: Final = ("stale food", "fresh food", "fruit")
MAX_COMMANDS: Final = 15
OPTIMAL_SHARE: Final = 0.9
"""Of the data's turns in a room that its player knows, on which it begins to do the right thing."""
_KNOWN: Final = (
    ("office", "bathroom", "garden", "backyard"),
    ("kitchen", "dining room", "living room", "bedroom"),
)
_FIRST_PLAYER_SHARE: Final = 0.75
_WAYS: Final = {
    "bedroom": (("go west",), ("go west",)),
    "office": (("go north",), ("go north",)),
    "bathroom": (("go north",), ("go north",)),
    "living room": (("take stale food from table", "go west"), ("go west",)),
    "kitchen": (("go east",), ("open fridge", "insert stale food into fridge", "close fridge")),
    "dining room": (("go east",), ("go west",)),
    "garden": (("go south",), ("go south",)),
    "backyard": (("go east",), ("go east",)),
}
"""Room -> what to do there without the stale food, and with it."""


class House(NamedTuple):
    """One state; equal states look alike and answer alike."""

    room: str
    places: tuple[str, ...]
    """Where each of ``THINGS`` is."""
    open: frozenset[str] = frozenset()
    """Containers that are open."""

    def where(self, thing: str) -> str:
        """Returns the place of a thing."""
        return self.places[list(THINGS).index(thing)]

    def at(self, place: str) -> list[str]:
        """Returns what is at a place."""
        return [thing for thing, found in zip(THINGS, self.places, strict=True) if found == place]

    def moved(self, thing: str, place: str) -> House:
        """Returns the house with a thing put elsewhere."""
        places = [
            place if name == thing else old for name, old in zip(THINGS, self.places, strict=True)
        ]
        return self._replace(places=tuple(places))

    @property
    def won(self) -> bool:
        """The stale food is in the closed fridge."""
        return self.where("stale food") == "fridge" and "fridge" not in self.open

    @property
    def lost(self) -> bool:
        """The stale food was eaten."""
        return self.where("stale food") == "eaten"


@lru_cache(maxsize=100_000)
def commands(house: House) -> dict[str, House]:
    """Returns every command that may be given, with the house it leads to."""
    room = house.room
    found = {f"go {way}": house._replace(room=to) for way, to in EXITS[room].items()}
    spots = {"table": f"{room} table"} if room in TABLES else {}
    box = CONTAINERS.get(room)
    if box is not None:
        verb = "close" if box in house.open else "open"
        found[f"{verb} {box}"] = house._replace(open=house.open ^ {box})
        if box in house.open:
            spots[box] = box
    for name, place in spots.items():
        found |= {f"take {one} from {name}": house.moved(one, "carried") for one in house.at(place)}
    floor = f"{room} floor"
    found |= {f"take {one}": house.moved(one, "carried") for one in house.at(floor)}
    for one in house.at("carried"):
        found[f"drop {one}"] = house.moved(one, floor)
        if one in FOOD:
            found[f"eat {one}"] = house.moved(one, "eaten")
        for name, place in spots.items():
            verb = f"put {one} on" if name == "table" else f"insert {one} into"
            found[f"{verb} {name}"] = house.moved(one, place)
    return found


def _listed(label: str, names: list[str]) -> str:
    return f"{label}: {' , '.join(names) or 'nothing'} ."


@lru_cache(maxsize=100_000)
def describe(house: House, partial: bool) -> str:
    """Returns what a player is told."""
    room, box = house.room, CONTAINERS.get(house.room)
    told = [] if partial else [f"You are in the {room} ."]
    if room in TABLES:
        told.append(_listed("table", house.at(f"{room} table")))
    if box is not None and box in house.open:
        told.append(_listed(f"open {box}", house.at(box)))
    elif box is not None:
        told.append(f"closed {box} .")
    told.append(_listed("floor", house.at(f"{room} floor")))
    if not partial:
        told.append(_listed("carried", house.at("carried")))
    told.append(f"You can: {' ; '.join(commands(house))} .")
    return f"{' '.join(told)}\n"


class TextNav:
    """A batch of episodes; a case is the number of the room in which one starts."""

    action_tokens = 6
    max_turns = MAX_COMMANDS
    goal = 1.0
    message_tokens = 112
    normaliser = Normaliser(least=0, average=0.26, best=1)

    def __init__(self, *, partial: bool = False) -> None:
        self.partial = partial
        names = [*ROOMS, *THINGS, *CONTAINERS.values(), "table", "floor", "nothing"]
        verbs = "You are in the can: go open close take from put on insert into drop eat closed"
        labels = "table: floor: carried: fridge: chest: . , ; north east south west"
        self.words = Words([*" ".join(names).split(), *verbs.split(), *labels.split()])
        self._told: dict[str, Tokens] = {}

    def cases(self) -> Ints:
        """Returns every room."""
        return np.arange(len(ROOMS))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draws rooms evenly."""
        return rng.integers(len(ROOMS), size=count)

    def reset(self, cases: Ints, seed: int) -> Turn:
        """Puts a player into each room; nothing is random."""
        del seed
        self.houses = [House(ROOMS[case], tuple(THINGS.values())) for case in cases]
        """Each episode's state, [B]."""
        self._done = np.zeros(len(cases), np.bool_)
        self._turns = 0
        return self._turn(np.zeros(len(cases), np.float32), self._done.copy())

    def step(self, actions: Tokens) -> Turn:
        """Does what was commanded; what may not be done changes nothing."""
        invalid = np.zeros(len(actions), np.bool_)
        rewards = np.zeros(len(actions), np.float32)
        self._turns += 1
        for place in np.flatnonzero(~self._done):
            text = self.words.decode(actions[place])
            after = commands(self.houses[place]).get(text[:-1]) if text.endswith("\n") else None
            invalid[place] = after is None
            house = self.houses[place] if after is None else after
            self.houses[place] = house
            rewards[place] = house.won
            self._done[place] = house.won or house.lost or self._turns == MAX_COMMANDS
        return self._turn(rewards, invalid)

    def _turn(self, rewards: Floats, invalid: Bools) -> Turn:
        messages = np.zeros((len(self.houses), self.message_tokens), np.int16)
        for place in np.flatnonzero(~self._done):
            text = describe(self.houses[place], self.partial)
            if text not in self._told:
                self._told[text] = widened(self.words.encode(text)[None], self.message_tokens)[0]
            messages[place] = self._told[text]
        fresh = self._turns == 0 or not self.partial
        return Turn(messages, fresh, rewards, self._done.copy(), invalid)

    def behave(self, rng: np.random.Generator, count: int) -> Recording:
        """Plays as two players, each of whom knows the way in half of the rooms."""
        known = [_KNOWN[0 if one < _FIRST_PLAYER_SHARE else 1] for one in rng.random(count)]
        plans: list[list[str]] = [[] for _ in range(count)]

        def command(place: int) -> str:
            house, plan = self.houses[place], plans[place]
            possible = list(commands(house))
            if not plan and house.room in known[place] and rng.random() < OPTIMAL_SHARE:
                has = house.where("stale food") == "carried"
                plan.extend(_WAYS[house.room][has])
            chosen = plan.pop(0) if plan else possible[rng.integers(len(possible))]
            return f"{chosen}\n"

        def act(turn: Turn) -> Tokens:
            table = self.words.table([command(i) if not turn.done[i] else "" for i in range(count)])
            return widened(table, self.action_tokens)

        return record(self, self.draw(rng, count), 0, act)
