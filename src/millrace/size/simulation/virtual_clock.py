"""Time that passes by what happens: requests that come, and what became of each."""

from dataclasses import dataclass

TOKEN = 7  # every answer is made of


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, or a call of one.

    blocks: an id for each 512 tokens of the prompt, where they are known; those that begin alike share pages
    then: calls behind it, tokens in and out, each of which comes when the one before is answered
    begun_s: of such a call, when the request came
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
        """The next call."""
        (n_input, n_output), *rest = self.then
        return Arrival(at_s, n_input, n_output, then=tuple(rest), begun_s=self.came_s)


def at_once(_: int) -> float:
    """No time between two steps: what the host takes is counted with the steps themselves."""
    return 0.0


class VirtualClock:
    """Seconds since the beginning; moved by steps, and by waiting for an arrival."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class RequestOutcome:
    """One request, or a call of one, in seconds of the virtual clock; nan: it has not come so far. What is waited for
    is from the beginning of its request on."""

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
        """nan: of an answer of one token"""
        n = self.arrival.n_output - 1
        return (self.last_s - self.first_s) / n if n else float("nan")
