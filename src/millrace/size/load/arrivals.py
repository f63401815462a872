"""What comes to instances, alone or behind a router: arrivals by chance, perhaps with one beginning, or a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.errors import ConfigError
from millrace.size.load.token_lengths import Lengths, length
from millrace.size.load.trace_arrivals import Replay, arrivals
from millrace.size.performance.roofline_cost import Floats
from millrace.size.question.question import Question
from millrace.size.simulation.virtual_clock import Arrival
from millrace.tune.recorded_requests import Recording
from millrace.tune.trace_formats import BLOCK

PREFIX_AWARE = "prefix-aware"
_MOST_TOKENS = 1 << 26  # of all prompts of a simulation
_TICKED = 0.5  # of requests that have a time of their own: below, a clock has rounded them


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between requests: gamma distributed of that shape; 1: Poisson arrivals, below 1 they come in bursts."""

    burstiness: float = 1.0

    def times(self, rate: float, n: int, seed: int) -> Floats:
        """(n,) The same seed gives the same gaps, only shorter or longer with the rate."""
        rng, shape = np.random.default_rng(seed), self.burstiness
        gaps = rng.exponential(1 / rate, n) if shape == 1 else rng.gamma(shape, 1 / (rate * shape), n)
        found: Floats = np.cumsum(gaps)
        return found

    def __str__(self) -> str:
        return "Poisson arrivals" if self.burstiness == 1 else f"gamma arrivals (burstiness {self.burstiness:g})"


def arrival(lengths: Lengths, at_s: float, blocks: tuple[int, ...] = ()) -> Arrival:
    """A request of these lengths, with all its calls. blocks: of the first one's prompt"""
    first, *rest = lengths.calls
    return Arrival(at_s, first.n_input, first.n_output, blocks, tuple((one.n_input, one.n_output) for one in rest))


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """left_out: of the trace, as they are longer than the context"""

    arrivals: Sequence[Arrival]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """routing: by its name; gaps: of what is not recorded; shared: blocks of 512 tokens that all prompts begin with

    recorded: requests as they came, with their lengths and beginnings
    """

    routing: str = "blind"
    gaps: Gaps = field(default_factory=Gaps)
    shared: int = 0
    recorded: Recording | None = None

    @property
    def is_cached(self) -> bool:
        """Beginnings are known."""
        return self.shared > 0 or (self.recorded is not None and len(self.recorded.block_id) > 0)

    @property
    def is_blind(self) -> bool:
        """Each instance has arrivals of its own, whatever the others have."""
        return self.routing == "blind" and self.recorded is None and not self.shared

    def coming(self, lengths: Lengths, context: int, rate: float, n: int, seed: int) -> ArrivalStream:
        """rate: requests/s of all instances, on average; n: requests at most. raises ConfigError where none fits"""
        if self.recorded is not None:
            return self._recorded(self.recorded, context, rate, n)
        times = self.gaps.times(rate, n, seed).tolist()
        begins = tuple(range(-self.shared, 0))  # and then what no other has
        own = range(len(times)) if self.shared else ()
        blocks = [(*begins, i) for i in own] or [()] * len(times)
        return ArrivalStream([arrival(lengths, t, b) for t, b in zip(times, blocks, strict=True)])

    def _recorded(self, recorded: Recording, context: int, rate: float, n: int) -> ArrivalStream:
        """From its beginning on, as many as are simulated, as much faster or slower as the load is."""
        speed = rate * recorded.span_s / len(recorded)
        found, left_out = arrivals(recorded, Replay(context, 1.0, _tick_s(recorded)))
        tokens = np.cumsum([one.n_input for one in found])
        some = found[: max(1, min(n, int(np.searchsorted(tokens, _MOST_TOKENS, side="right"))))]
        return ArrivalStream([replace(one, at_s=one.at_s / speed) for one in some], left_out)


def traffic_of(question: Question, recorded: Recording | None) -> Traffic:
    """raises ConfigError where a router is to know beginnings, and nobody says which requests share"""
    routing, asked, gaps = question.search.routing, question.request, Gaps(question.limits.burstiness)
    said = ("isl", "osl", "input", "output", "preset", "system", "documents", "history", "question", "pipeline")
    if any(getattr(asked, name) is not None for name in said):
        recorded = None  # other requests than these
    if routing != PREFIX_AWARE:
        return Traffic(routing, gaps, recorded=recorded)
    tokens = 0.0 if asked.system is None else length(asked.system, "system", asked.words_a_token)[0]
    found = Traffic(routing, gaps, int(tokens) // BLOCK, recorded)
    if not found.is_cached:
        raise ConfigError(f"--routing {routing}, and nothing says which requests begin alike",
                          f"a --trace with hash_ids and its own lengths, or --system of {BLOCK} tokens at least",
                          "say one of them, or choose --routing least-loaded")  # fmt: skip
    return found


def _tick_s(recorded: Recording) -> float:
    """Of the clock that has rounded the times; 0: none has."""
    times = np.unique(recorded.at_s)
    if not 1 < len(times) <= _TICKED * len(recorded):
        return 0.0
    return min(3600.0, float(np.diff(times).min()))
