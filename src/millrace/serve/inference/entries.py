"""What is known of one model of a repository: the versions that are served, and what became of those that are not."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from millrace.serve.inference.brought import Brought
from millrace.serve.inference.ensemble import Ensemble
from millrace.serve.inference.model import Model
from millrace.serve.repository.folders import Model as FoundModel


class State(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"  # the reason of what is gone because somebody wanted it so


@dataclass(slots=True)
class Entry:
    """models: those that are served, by version. states: of every version that was ever tried, with its reason"""

    models: dict[int, Model] = field(default_factory=dict)
    states: dict[int, tuple[State, str]] = field(default_factory=dict)
    stamp: object = None  # of its files, when they were read
    read: FoundModel | None = None  # as it was found then, of those that are served
    # Of an ensemble that is not loaded yet, or could not be: its members, and what a client brought.
    wanted: frozenset[str] = frozenset()
    given: Brought = field(default_factory=Brought)

    @property
    def is_as_wished(self) -> bool:
        """Each version is ready, and whole, or on its way out by wish."""
        by_wish = ((State.UNLOADING, ""), (State.UNAVAILABLE, UNLOADED))
        is_there = all(state[0] is State.READY or state in by_wish for state in self.states.values())
        return is_there and not any(model.troubles for model in self.models.values())

    @property
    def ensembles(self) -> list[Ensemble]:
        return [model for model in self.models.values() if isinstance(model, Ensemble)]

    @property
    def members(self) -> frozenset[str]:
        """Of the ensemble that it is, or will be."""
        return self.wanted.union(*(ensemble.members for ensemble in self.ensembles))


@dataclass(slots=True)
class Turns:
    """n: changes of one model that are made or wait"""

    n: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    are_over: asyncio.Event = field(default_factory=asyncio.Event)
