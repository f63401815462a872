"""Liveness, readiness and progress of a server, from the heartbeats of its engine loops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class EngineHealth(Protocol):
    """The health of an engine at one moment."""

    @property
    def healthy(self) -> bool:
        """Return False if the engine has stopped on an error."""

    @property
    def idle(self) -> bool:
        """Return whether the engine has nothing to do."""

    @property
    def last_step_s(self) -> float:
        """Return the seconds since the last progress."""


class Phase(Enum):
    WARMING = auto()
    SERVING = auto()
    DRAINING = auto()
    BROKEN = auto()  # the warm-up failed


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a check. message: the reason if it is not ok"""

    ok: bool
    message: str


class Heartbeat:
    """Health of a server. Ready: warmed up, not draining, every engine idle or with a recent step, nothing missing."""

    def __init__(
        self,
        checks: Sequence[Callable[[], EngineHealth]],
        stall_timeout_s: float,
        missing: Sequence[Callable[[], str]] = (),
    ) -> None:
        """missing: return what a backend cannot serve now although its engine works; "" if nothing is missing"""
        self._checks, self._missing = checks, missing
        self._stall_timeout_s = stall_timeout_s
        self.phase = Phase.WARMING
        self.trouble: Callable[[], str] = lambda: ""  # if BROKEN: the remaining failure; "": none

    @property
    def accepting(self) -> bool:
        """Return whether requests are accepted, so that BusyError means a full queue."""
        return self.phase in (Phase.WARMING, Phase.SERVING) and all(check().healthy for check in self._checks)

    def ready(self) -> Health:
        """Check whether new requests may be sent."""
        if self.phase is Phase.DRAINING:
            return Health(False, "shutting down: running requests are finished, new ones are refused")
        alive = self.alive()
        reason = next(filter(None, (missing() for missing in self._missing)), "") if alive.ok else ""
        return Health(False, reason) if reason else alive

    def alive(self) -> Health:
        """Check whether the engines work; ok while draining, and if a tensor model is missing."""
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
