"""Live, ready and making progress: three different questions, answered from the engine loop's own heartbeat."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from millrace.runtime.stats import LoopStats


class Phase(Enum):
    WARMING = auto()
    SERVING = auto()
    DRAINING = auto()
    BROKEN = auto()  # the warm-up failed


@dataclass(frozen=True, slots=True)
class Health:
    """One answer. `message` says why not."""

    ok: bool
    message: str


class Heartbeat:
    """Ready means: warmed up, not draining, and the engine loop either idle or with a recent step."""

    def __init__(self, stats: Callable[[], LoopStats], stall_timeout_s: float) -> None:
        self._stats = stats
        self._stall_timeout_s = stall_timeout_s
        self.phase = Phase.WARMING
        self.trouble = ""  # with BROKEN

    @property
    def accepting(self) -> bool:
        """A BusyError now means a full queue."""
        return self.phase in (Phase.WARMING, Phase.SERVING) and self._stats().healthy

    def ready(self) -> Health:
        """May new requests be sent here?"""
        if self.phase is Phase.DRAINING:
            return Health(False, "shutting down: running requests are finished, new ones are refused")
        return self.alive()

    def alive(self) -> Health:
        """Does the engine work? Says yes while draining."""
        stats = self._stats()
        if not stats.healthy:
            return Health(False, "the engine has stopped; the log says why")
        if not stats.idle and stats.last_step_s > self._stall_timeout_s:
            return Health(False, f"the engine is stuck: no step was finished for {stats.last_step_s:.0f} s")
        if self.phase is Phase.WARMING:
            return Health(False, "warming up")
        if self.phase is Phase.BROKEN:
            return Health(False, f"the warm-up failed: {self.trouble}")
        return Health(True, "ready")
