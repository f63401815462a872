"""What this project set out to reach beside its peers, and how far a run is from it.

A milestone is what a first release needs, a goal what it aims at. Both are ratios to the fastest of the named peers, or
shares of a limit of the machine.
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
    """`peers` empty: a share of the machine's limit. `or_share`: this share of the limit will do as well.

    shapes: or names of model files
    """

    shapes: tuple[str, ...]
    workload: str
    ours: str
    peers: tuple[str, ...]
    milestone: float
    goal: float
    or_share: float | None = None
    how: str = ""  # the peers are set up, where two goals differ in it
    right: bool = False  # counts only where our answers are as near to float32: `as_right`

    @property
    def text(self) -> str:
        if not self.peers:
            limit = "the read bandwidth" if self.workload.startswith("decode") else "the instructions' peak"
            return f"{self.workload}: {self.ours}, share of {limit}"
        return f"{self.workload}: {self.ours} to {' or '.join(self.peers)}" + (f", {self.how}" if self.how else "")


GOALS = (
    Goal(_BIG, "prefill-512", "millrace-w4a8", _BEST_4_BIT, 2.2, 2.5),
    Goal(_BIG, "prefill-512", "millrace-w4a8", _EQUAL_GROUPS, 1.0, 1.15, or_share=0.85, how="at equal groups"),
    Goal(_BIG, "prefill-512", "millrace-w4a8", _OPENVINO, 1.0, 1.15, or_share=0.85, how="at its best"),
    Goal(_BIG, "prefill-4096", "millrace-w4a8", _BEST_4_BIT, 1.6, 2.0),
    Goal(_BIG, "decode-16", "millrace-w4a8", _Q4_0, 2.2, 2.5),
    Goal(_BIG, "decode-4", "millrace-w4a8", _Q4_0, 1.7, 2.0),
    Goal(_BIG, "decode-1", "millrace-w4a8", _Q4_0, 1.05, 1.15),
    Goal(_BIG, "decode-1", "millrace-w4a8", (), 0.85, 0.92),
    Goal(_BIG, "prefill-512", "millrace-w8a8", ("llama.cpp-q8_0",), 2.5, 3.0),
    Goal(_BIG, "decode-1", "millrace-w8a8", ("llama.cpp-q8_0",), 1.0, 1.05),
    Goal(_BIG, "decode-1", "millrace-w8a8", (), 0.92, 0.92),
    Goal(_BIG, "prefill-512", "millrace-bf16", ("llama.cpp-bf16",), 1.0, 1.1, or_share=0.8),
    Goal(_BIG, "decode-1", "millrace-bf16", ("llama.cpp-bf16",), 0.98, 1.0),
    Goal(_BIG, "prefill-512", "millrace-w4a8-avx2", ("llama.cpp-q4_0-avx2",), 1.2, 1.5),
    Goal(_SMALL, "prefill-512", "millrace-w4a8", _BEST_4_BIT, 1.7, 2.0),
    Goal(_SMALL, "decode-1", "millrace-w4a8", _Q4_0, 1.2, 1.3),
    Goal(_SMALL, "decode-16", "millrace-w4a8", _Q4_0, 2.0, 2.5),
    Goal(("llama-143m",), "decode-16", "millrace-w4a8-generate", _Q4_0, 2.1, 2.5),
    Goal(_REAL, "prefill-512", "millrace", ("llama.cpp",), 4.0, 4.0, right=True),
    Goal(_REAL, "decode-1", "millrace", ("llama.cpp",), 1.5, 1.5, right=True),
    Goal(_REAL, "decode-16", "millrace", ("llama.cpp",), 3.0, 3.0, right=True),
)
KL, KL_BESIDE = 0.004, 0.001  # nats a token: allowed in any case, and above the peer's


def as_right(ours: float, theirs: float | None) -> bool:
    """Whether an engine's KL to float32 is small by itself, or no more than a little above the other's."""
    return ours <= KL or (theirs is not None and ours <= theirs + KL_BESIDE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal beside what was reached; None: it was not measured, as where the machine changed beside the samples."""

    goal: Goal
    reached: float | None
    share: float | None  # of the limit, where that would do as well
    against: str | None  # the peer that counted
    kl: float | None = None  # of ours to float32, where the goal asks for it; None: of these numbers it is not known
    kl_against: float | None = None  # of the peer

    @property
    def verdict(self) -> str:
        g = self.goal
        if self.reached is None:
            return "not measured"
        if g.right and self.kl is None:
            return "not measured: no KL is known of these numbers"
        if g.right and self.kl is not None and not as_right(self.kl, self.kl_against):
            beside = "" if self.kl_against is None else f" beside {self.kl_against:.2g}"
            return f"missed: answers are too far from float32, KL {self.kl:.2g}{beside}"
        if g.or_share is not None and self.share is not None and g.or_share <= self.share:
            return f"goal met: {self.share:.0%} of the limit"
        if self.reached >= g.goal:
            return "goal met"
        if self.reached >= g.milestone:
            return f"milestone met, goal missed by {1 - self.reached / g.goal:.0%}"
        return f"missed: milestone by {1 - self.reached / g.milestone:.0%}, goal by {1 - self.reached / g.goal:.0%}"

    def as_dict(self) -> dict[str, Any]:
        g = self.goal
        return {
            "what": g.text, "milestone": g.milestone, "goal": g.goal, "or_share_of_limit": g.or_share,
            "against": self.against, "reached": self.reached and round(self.reached, 3),
            "share_of_limit": self.share and round(self.share, 3), "verdict": self.verdict,
            **({"kl": self.kl, "kl_against": self.kl_against} if g.right else {}),
        }  # fmt: skip


Speedup = Callable[[str, str, str], float | None]  # workload, ours, theirs
Fastest = Callable[[str, tuple[str, ...]], str | None]
Share = Callable[[str, str], float | None]  # workload, engine
Divergence = Callable[[str], float | None]  # engine; nats a token to float32, on the same weights


def outcomes(
    shape: str, speedup: Speedup, fastest: Fastest, share: Share, kl: Divergence = lambda _: None
) -> list[Outcome]:
    """Of all goals for this shape, or the file of this name."""
    found = []
    for g in GOALS:
        if shape not in g.shapes:
            continue
        limit = share(g.workload, g.ours)
        if not g.peers:
            found.append(Outcome(g, limit, None, None))
            continue
        peer = fastest(g.workload, g.peers)
        reached = speedup(g.workload, g.ours, peer) if peer else None
        apart = (kl(g.ours), kl(peer) if peer else None) if g.right else (None, None)
        found.append(Outcome(g, reached, limit if g.or_share else None, peer, *apart))
    return found
