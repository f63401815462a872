"""Timing of the null server, random by seed and request number, and the record of what it sent."""

import heapq
import random
import time
from dataclasses import dataclass, field

from millrace.bench.load.distribution import Spread

FAULTS = ("status", "break", "malformed", "stall", "error")


@dataclass(frozen=True, slots=True)
class NullTiming:
    """Timing of answers. ttft_ms: from the request's last byte to the first token; itl_ms: between tokens

    An inference of a batch takes as long as an answer of that many tokens. instances: requests that run at a time, the
    others queue in order of arrival; 0: unlimited. kv_tokens: KV-cache size reported by its metrics; 0: no metrics
    """

    ttft_ms: str = "100"
    itl_ms: str = "20"
    tokens_per_chunk: int = 1
    seed: int = 0
    fault: str | None = None  # one of FAULTS, halfway through an answer; `status` at once
    fault_every: int = 1  # every n-th request
    instances: int = 0
    kv_tokens: int = 0

    def token_s(self, number: int, n: int) -> list[float]:
        """Return when each of n tokens of a request is due, in seconds after its arrival."""
        rng, due = random.Random(f"{self.seed}/{number}"), []
        ttft, itl = Spread.parse(self.ttft_ms, "ttft_ms"), Spread.parse(self.itl_ms, "itl_ms")
        at = ttft.draw(rng) / 1e3
        for _ in range(n):
            due.append(at)
            at += itl.draw(rng) / 1e3
        return due


@dataclass(slots=True)
class Sent:
    """Record of one request. sent_s, n_tokens: of each chunk"""

    id: str
    kind: str
    arrived_s: float
    n_prompt: int
    due_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    n_tokens: list[int] = field(default_factory=list)
    model: str = ""
    queue_s: float = 0.0  # that it waited for an instance


class Ledger:
    """Schedule and record of all requests. truth: the records in order of arrival"""

    def __init__(self, timing: NullTiming) -> None:
        self.timing, self.truth = timing, list[Sent]()
        self._free_s = [0.0] * timing.instances  # when each instance is

    def record_request(self, name: str, kind: str, n_prompt: int, n: int, model: str = "") -> Sent:
        """Record a request that has arrived now, and schedule its n tokens after a free instance."""
        sent = Sent(name, kind, time.perf_counter(), n_prompt, self.timing.token_s(len(self.truth), n), model=model)
        self.truth.append(sent)
        if self._free_s:
            begins_s = max(sent.arrived_s, heapq.heappop(self._free_s))
            heapq.heappush(self._free_s, begins_s + sent.due_s[-1])
            sent.queue_s = begins_s - sent.arrived_s
            sent.due_s = [sent.queue_s + due_s for due_s in sent.due_s]
        return sent

    def record_inference(self, name: str, model: str, n: int) -> Sent:
        """Record an inference that has arrived now; it ends at the time of its last item."""
        sent = self.record_request(name, "infer", 0, n, model)
        del sent.due_s[:-1]
        return sent

    def load(self, at_s: float) -> tuple[int, int, float]:
        """Return running requests, waiting requests, and the KV-cache usage of the running ones."""
        running, waiting, n_tokens = 0, 0, 0
        for sent in self.truth:
            since_s = at_s - sent.arrived_s
            if since_s < sent.queue_s:
                waiting += 1
            elif since_s < sent.due_s[-1]:
                running += 1
                n_tokens += sent.n_prompt + sum(due_s <= since_s for due_s in sent.due_s)
        return running, waiting, min(1.0, n_tokens / self.timing.kv_tokens)

    def fault_of(self, number: int) -> str | None:
        timing = self.timing
        return timing.fault if timing.fault and number % timing.fault_every == timing.fault_every - 1 else None
