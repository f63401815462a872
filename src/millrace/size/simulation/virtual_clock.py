"""Virtual clock, arrivals and request outcomes of simulations."""

from dataclasses import dataclass

TOKEN = 7  # the only token of all answers


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, or one of its sequential calls.

    blocks: an id for each 512 tokens of the prompt, if known; equal leading blocks share pages
    then: input and output tokens of the following calls, each submitted when the previous one is answered
    begun_s: arrival of the request, for a following call
    """

    at_s: float
    n_input: int
    n_output: int
    blocks: tuple[int, ...] = ()
    then: tuple[tuple[int, int], ...] = ()
    begun_s: float | None = None

    @property
    def came_s(self) -> float:
        return self.at_s if self.begun_s is None else self.begun_s

    def following(self, at_s: float) -> "Arrival":
        """Return the arrival of the next call."""
        (n_input, n_output), *rest = self.then
        return Arrival(at_s, n_input, n_output, then=tuple(rest), begun_s=self.came_s)


def at_once(_: int) -> float:
    """Return 0: host time is part of the step times."""
    return 0.0


class VirtualClock:
    """Seconds since the start; advanced by steps and by waiting for arrivals."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class RequestOutcome:
    """Times of a request or call on the virtual clock; nan: not reached yet. Latencies count from the request."""

    arrival: Arrival
    first_s: float = float("nan")
    last_s: float = float("nan")

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.came_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrival.came_s

    @property
    def itl_s(self) -> float:
        """Return the mean time between tokens; nan for an answer of one token."""
        n = self.arrival.n_output - 1
        return (self.last_s - self.first_s) / n if n else float("nan")
