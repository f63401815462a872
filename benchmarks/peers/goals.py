"""What this project set out to reach beside its peers, and how far a run is from it.

A milestone is what a first release needs, a goal what it aims at. Both are ratios to the fastest of the named peers, or
shares of a limit of the machine. A ratio to a peer counts only if the KL to float32 is no worse than the peer's and if
it is a median of at least `ROUNDS` rounds; a share of a limit is no substitute for a ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.runs import REAL

_REAL = (REAL,)
_BIG, _SMALL = ("tinyllama-1.1b",), ("llama-143m", "qwen2.5-0.5b")
_Q4_0 = ("llama.cpp-q4_0",)
_BEST_4_BIT = ("llama.cpp-q4_0", "llama.cpp-q4_k_m")
_OPENVINO, _EQUAL_GROUPS = ("openvino-int4", "openvino-int4-asym"), ("openvino-int4-a128", "openvino-int4-asym-a128")


@dataclass(frozen=True, slots=True)
class Goal:
    """`peers` empty: a share of the machine's limit.

    shapes: or names of model files
    """

    shapes: tuple[str, ...]
    workload: str
    ours: str
    peers: tuple[str, ...]
    milestone: float
    goal: float
    how: str = ""  # the peers are set up, where two goals differ in it

    @property
    def text(self) -> str:
        if not self.peers:
            limit = "the read bandwidth" if self.workload.startswith("decode") else "the instructions' peak"
            return f"{self.workload}: {self.ours}, share of {limit}"
        return f"{self.workload}: {self.ours} to {' or '.join(self.peers)}" + (f", {self.how}" if self.how else "")


GOALS = (
    Goal(_BIG, "prefill-512", "millrace-w4a8", _BEST_4_BIT, 2.2, 2.5),
    Goal(_BIG, "prefill-512", "millrace-w4a8", _EQUAL_GROUPS, 1.0, 1.15, how="at equal groups"),
    Goal(_BIG, "prefill-512", "millrace-w4a8", _OPENVINO, 1.0, 1.15, how="at its best"),
    Goal(_BIG, "prefill-4096", "millrace-w4a8", _BEST_4_BIT, 1.6, 2.0),
    Goal(_BIG, "decode-16", "millrace-w4a8", _Q4_0, 2.2, 2.5),
    Goal(_BIG, "decode-4", "millrace-w4a8", _Q4_0, 1.7, 2.0),
    Goal(_BIG, "decode-1", "millrace-w4a8", _Q4_0, 1.05, 1.15),
    Goal(_BIG, "decode-1", "millrace-w4a8", (), 0.85, 0.92),
    Goal(_BIG, "prefill-512", "millrace-w8a8", ("llama.cpp-q8_0",), 2.5, 3.0),
    Goal(_BIG, "decode-1", "millrace-w8a8", ("llama.cpp-q8_0",), 1.0, 1.05),
    Goal(_BIG, "decode-1", "millrace-w8a8", (), 0.92, 0.92),
    Goal(_BIG, "prefill-512", "millrace-bf16", ("llama.cpp-bf16",), 1.0, 1.1),
    Goal(_BIG, "decode-1", "millrace-bf16", ("llama.cpp-bf16",), 0.98, 1.0),
    Goal(_BIG, "prefill-512", "millrace-w4a8-avx2", ("llama.cpp-q4_0-avx2",), 1.2, 1.5),
    Goal(_SMALL, "prefill-512", "millrace-w4a8", _BEST_4_BIT, 1.7, 2.0),
    Goal(_SMALL, "decode-1", "millrace-w4a8", _Q4_0, 1.2, 1.3),
    Goal(_SMALL, "decode-16", "millrace-w4a8", _Q4_0, 2.0, 2.5),
    Goal(("llama-143m",), "decode-16", "millrace-w4a8-generate", _Q4_0, 2.1, 2.5),
    Goal(_REAL, "prefill-512", "millrace", ("llama.cpp",), 4.0, 4.0),
    Goal(_REAL, "decode-1", "millrace", ("llama.cpp",), 1.5, 1.5),
    Goal(_REAL, "decode-16", "millrace", ("llama.cpp",), 3.0, 3.0),
)
ROUNDS = 5  # the fewest whose median decides


def no_worse(kl: float, kl_of_peer: float) -> bool:
    """Compare two divergences at two significant digits, as all tables show them."""
    return float(f"{kl:.2g}") <= float(f"{kl_of_peer:.2g}")


def verdict_beside(
    reached: float | None, goal: float, milestone: float, kl: float | None, kl_of_peer: float | None, rounds: int
) -> str:
    """Judge a speed relative to a peer's. kl, kl_of_peer: to float32, None if not known"""
    verdict = verdict_of(reached, goal, milestone)
    if not verdict.startswith(("goal met", "milestone met")):
        return verdict
    if kl is None or kl_of_peer is None:
        return f"not counted: the KL of {'this engine' if kl is None else 'the peer'} is not known"
    if not no_worse(kl, kl_of_peer):
        return f"missed: KL {kl:.2g} is worse than the peer's {kl_of_peer:.2g}"
    return if_decided(verdict, rounds)


def verdict_of(reached: float | None, goal: float, milestone: float) -> str:
    """Judge a figure of which more is better."""
    if reached is None:
        return "not measured"
    if reached >= goal:
        return "goal met"
    if reached >= milestone:
        return f"milestone met, goal missed by {1 - reached / goal:.0%}"
    return f"missed: milestone by {1 - reached / milestone:.0%}, goal by {1 - reached / goal:.0%}"


def if_decided(verdict: str, rounds: int) -> str:
    """Return the verdict, unless it claims something that too few rounds have shown."""
    if rounds >= ROUNDS or not verdict.startswith(("goal met", "milestone met", "met")):
        return verdict
    return f"not decided: {rounds} round{'s' if rounds > 1 else ''}, a median of {ROUNDS} decides"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal beside what was reached; None: it was not measured, as where the machine changed beside the samples."""

    goal: Goal
    reached: float | None
    share: float | None  # of the limit
    against: str | None  # the peer that counted
    kl: float | None = None  # of ours to float32, None: not known
    kl_against: float | None = None  # of the peer
    rounds: int = ROUNDS

    @property
    def verdict(self) -> str:
        g = self.goal
        if not g.peers:
            return if_decided(verdict_of(self.reached, g.goal, g.milestone), self.rounds)
        return verdict_beside(self.reached, g.goal, g.milestone, self.kl, self.kl_against, self.rounds)

    def as_dict(self) -> dict[str, Any]:
        g = self.goal
        return {
            "what": g.text, "milestone": g.milestone, "goal": g.goal,
            "against": self.against, "reached": self.reached and round(self.reached, 3),
            "share_of_limit": self.share and round(self.share, 3), "verdict": self.verdict,
            **({"kl": self.kl, "kl_against": self.kl_against} if g.peers else {}),
        }  # fmt: skip


Speedup = Callable[[str, str, str], float | None]  # workload, ours, theirs
Fastest = Callable[[str, tuple[str, ...]], str | None]
Share = Callable[[str, str], float | None]  # workload, engine
Divergence = Callable[[str], float | None]  # engine; nats a token to float32


def outcomes(
    shape: str, speedup: Speedup, fastest: Fastest, share: Share, kl: Divergence, rounds: int = ROUNDS
) -> list[Outcome]:
    """Of all goals for this shape, or the file of this name."""
    found = []
    for g in GOALS:
        if shape not in g.shapes:
            continue
        limit = share(g.workload, g.ours)
        if not g.peers:
            found.append(Outcome(g, limit, None, None, rounds=rounds))
            continue
        peer = fastest(g.workload, g.peers)
        reached = speedup(g.workload, g.ours, peer) if peer else None
        found.append(Outcome(g, reached, limit, peer, kl(g.ours), kl(peer) if peer else None, rounds))
    return found
