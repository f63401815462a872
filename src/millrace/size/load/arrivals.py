"""Request arrivals for simulations: random (with an optional shared prefix) or from a trace, with a router or not."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.errors import ConfigError
from millrace.size.load.token_lengths import Lengths, parse_length
from millrace.size.load.trace_arrivals import Replay, arrivals
from millrace.size.performance.roofline_cost import Floats
from millrace.size.question.question import SizingQuestion
from millrace.size.simulation.virtual_clock import Arrival
from millrace.tune.recorded_requests import Recording
from millrace.tune.trace_formats import BLOCK

PREFIX_AWARE = "prefix-aware"
_MAX_TOKENS = 1 << 26  # of all prompts of a simulation
_TICKED = 0.5  # share of distinct timestamps below which the clock of a trace is taken to be coarse


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gamma-distributed gaps between requests. burstiness: the shape; 1 is Poisson, below 1 arrivals are bursty"""

    burstiness: float = 1.0

    def times(self, rate: float, n: int, seed: int) -> Floats:
        """Return n arrival times in seconds; the same seed gives the same gaps, scaled by the rate."""
        rng, shape = np.random.default_rng(seed), self.burstiness
        gaps = rng.exponential(1 / rate, n) if shape == 1 else rng.gamma(shape, 1 / (rate * shape), n)
        at_s: Floats = np.cumsum(gaps)
        return at_s

    def __str__(self) -> str:
        return "Poisson arrivals" if self.burstiness == 1 else f"gamma arrivals (burstiness {self.burstiness:g})"


def arrival(lengths: Lengths, at_s: float, blocks: tuple[int, ...] = ()) -> Arrival:
    """Create a request with all its calls. blocks: ids of the first call's prompt"""
    first, *rest = lengths.calls
    return Arrival(at_s, first.n_input, first.n_output, blocks, tuple((call.n_input, call.n_output) for call in rest))


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """Arrivals of a simulation. left_out: requests of the trace that are longer than the context"""

    arrivals: Sequence[Arrival]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests reach the instances. routing: name of the router; gaps: if nothing is recorded

    shared: blocks of 512 tokens that all prompts start with; recorded: a trace with lengths and prefixes
    """

    routing: str = "blind"
    gaps: Gaps = field(default_factory=Gaps)
    shared: int = 0
    recorded: Recording | None = None

    @property
    def is_cached(self) -> bool:
        """Whether prefixes are known."""
        return self.shared > 0 or (self.recorded is not None and len(self.recorded.block_id) > 0)

    @property
    def is_blind(self) -> bool:
        """Whether each instance has independent arrivals."""
        return self.routing == "blind" and self.recorded is None and not self.shared

    def stream(self, lengths: Lengths, context: int, rate: float, n: int, seed: int) -> ArrivalStream:
        """Return at most n arrivals. rate: mean requests/s of all instances. raises ConfigError if none fits"""
        if self.recorded is not None:
            return self._replay(self.recorded, context, rate, n)
        times = self.gaps.times(rate, n, seed).tolist()
        begins = tuple(range(-self.shared, 0))  # followed by a block of its own
        own = range(len(times)) if self.shared else ()
        blocks = [(*begins, i) for i in own] or [()] * len(times)
        return ArrivalStream([arrival(lengths, t, b) for t, b in zip(times, blocks, strict=True)])

    def _replay(self, recorded: Recording, context: int, rate: float, n: int) -> ArrivalStream:
        """Return the first requests of the trace, with times scaled to the rate."""
        speed = rate * recorded.span_s / len(recorded)
        requests, left_out = arrivals(recorded, Replay(context, 1.0, _tick_s(recorded)))
        tokens = np.cumsum([request.n_input for request in requests])
        some = requests[: max(1, min(n, int(np.searchsorted(tokens, _MAX_TOKENS, side="right"))))]
        return ArrivalStream([replace(request, at_s=request.at_s / speed) for request in some], left_out)


def make_traffic(question: SizingQuestion, recorded: Recording | None) -> Traffic:
    """Create the traffic of a question. raises ConfigError if prefix-aware routing lacks prefix information"""
    routing, request, gaps = question.search.routing, question.request, Gaps(question.limits.burstiness)
    length_settings = (
        "isl",
        "osl",
        "input",
        "output",
        "preset",
        "system",
        "documents",
        "history",
        "question",
        "pipeline",
    )
    if any(getattr(request, name) is not None for name in length_settings):
        recorded = None  # the user gives other lengths than the trace has
    if routing != PREFIX_AWARE:
        return Traffic(routing, gaps, recorded=recorded)
    tokens = 0.0 if request.system is None else parse_length(request.system, "system", request.words_a_token)[0]
    traffic = Traffic(routing, gaps, int(tokens) // BLOCK, recorded)
    if not traffic.is_cached:
        raise ConfigError(f"--routing {routing}, and nothing says which requests begin alike",
                          f"a --trace with hash_ids and its own lengths, or --system of {BLOCK} tokens at least",
                          "say one of them, or choose --routing least-loaded")  # fmt: skip
    return traffic


def _tick_s(recorded: Recording) -> float:
    """Return the resolution of the trace's clock in seconds; 0 if timestamps are not rounded."""
    times = np.unique(recorded.at_s)
    if not 1 < len(times) <= _TICKED * len(recorded):
        return 0.0
    return min(3600.0, float(np.diff(times).min()))
