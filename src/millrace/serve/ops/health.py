"""Live, ready and making progress: three different questions, answered from the engine loop's own heartbeat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class EngineHealth(Protocol):
    """One moment of an engine."""

    @property
    def healthy(self) -> bool:
        """False: it has stopped on an error."""

    @property
    def idle(self) -> bool:
        """It has nothing to do."""

    @property
    def last_step_s(self) -> float:
        """Seconds since it last showed progress."""


class Phase(Enum):
    WARMING = auto()
    SERVING = auto()
    DRAINING = auto()
    BROKEN = auto()  # what is done before it is ready failed


@dataclass(frozen=True, slots=True)
class Health:
    """One answer. `message` says why not."""

    ok: bool
    message: str


class Heartbeat:
    """Ready means: warmed up, not draining, every engine either idle or with a recent step, and nothing missing."""

    def __init__(
        self,
        checks: Sequence[Callable[[], EngineHealth]],
        stall_timeout_s: float,
        missing: Sequence[Callable[[], str]] = (),
    ) -> None:
        """missing: what is not there now of what a backend serves, though its engine works; "": nothing"""
        self._checks, self._missing = checks, missing
        self._stall_timeout_s = stall_timeout_s
        self.phase = Phase.WARMING
        self.trouble: Callable[[], str] = lambda: ""  # with BROKEN: what is left of it now; "": nothing

    @property
    def accepting(self) -> bool:
        """A BusyError now means a full queue."""
        return self.phase in (Phase.WARMING, Phase.SERVING) and all(check().healthy for check in self._checks)

    def ready(self) -> Health:
        """May new requests be sent here?"""
        if self.phase is Phase.DRAINING:
            return Health(False, "shutting down: running requests are finished, new ones are refused")
        alive = self.alive()
        reason = next(filter(None, (missing() for missing in self._missing)), "") if alive.ok else ""
        return Health(False, reason) if reason else alive

    def alive(self) -> Health:
        """Does the engine work? Says yes while draining, and where a tensor model is missing: others are served."""
        for check in self._checks:
            now = check()
            if not now.healthy:
                return Health(False, "the engine has stopped; the log says why")
            if not now.idle and now.last_step_s > self._stall_timeout_s:
                return Health(False, f"the engine is stuck: no step was finished for {now.last_step_s:.0f} s")
        if self.phase is Phase.WARMING:
            return Health(False, "warming up")
        if self.phase is Phase.BROKEN and (trouble := self.trouble()):
            return Health(False, trouble)
        return Health(True, "ready")
