"""A minimal chat client for `millrace demo`. Benchmarks use `bench/run/run.py`."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest
from millrace.errors import MachineError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoChatRequest:
    """One chat request. `ignore_eos` makes the answer exactly `max_tokens` long."""

    text: str
    max_tokens: int
    seed: int
    ignore_eos: bool = False

    def question(self) -> BenchRequest:
        extra = {"seed": self.seed, "ignore_eos": self.ignore_eos}
        return BenchRequest([BenchMessage("user", self.text)], self.max_tokens, extra)


@dataclass(slots=True)
class ChatResult:
    """One chat answer: seconds from sending to each chunk of text, and the usage reported by the server."""

    text: str = ""
    chunk_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_output: int = 0
    finish_reason: str | None = None

    @classmethod
    def from_record(cls, answer: BenchRecord) -> "ChatResult":
        """Convert a record. raises MachineError if the request failed"""
        if answer.failure is not None:
            raise MachineError(
                f"the server gave no answer ({answer.detail})", "a streamed chat completion", "its log says more"
            )
        chunk_s = [at_s - answer.sent_s for at_s in answer.chunk_s]
        return cls(answer.text, chunk_s, answer.n_prompt or 0, answer.n_output, answer.finish_reason)

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def inter_token_s(self) -> float:
        """Return the mean time between tokens; a chunk holds all tokens that were ready together."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(self.n_output - 1, 1)

    @property
    def pauses_s(self) -> list[float]:
        """Return the seconds between chunks of text."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def ask(url: str, request: DemoChatRequest, show: Callable[[str], None] | None = None) -> ChatResult:
    """Send one request and read its stream to the end. raises MachineError if it fails"""

    async def asking() -> BenchRecord:
        async with Client(_target(url)) as client:
            return await client.ask(request.question(), on_text=show)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return ChatResult.from_record(runner.run(asking()))


def ask_all(url: str, asks: Sequence[DemoChatRequest], concurrency: int) -> tuple[list[ChatResult], float]:
    """Send all requests with a concurrency limit; return answers and elapsed seconds. raises MachineError"""

    async def asking() -> list[BenchRecord]:
        async with Client(_target(url)) as client:
            places = asyncio.Semaphore(concurrency)

            async def send(request: DemoChatRequest) -> BenchRecord:
                async with places:
                    return await client.ask(request.question())

            return await asyncio.gather(*map(send, asks))

    start_s = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(asking())
    return [ChatResult.from_record(answer) for answer in answers], time.perf_counter() - start_s


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _target(url: str) -> BenchTarget:
    return BenchTarget(url, CHAT, timeout_s=TIMEOUT_S, keep_text=True)
