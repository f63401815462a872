"""A few chats, asked from plain code: what `millrace demo` shows. A benchmark asks for more: `bench/run/run.py`."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from millrace.bench.client.client import Client, Target
from millrace.bench.client.endpoints import CHAT
from millrace.bench.client.request_record import Answer, Message, Question
from millrace.errors import MachineError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoChatRequest:
    """One chat request. `ignore_eos` makes the answer exactly `max_tokens` long."""

    text: str
    max_tokens: int
    seed: int
    ignore_eos: bool = False

    def question(self) -> Question:
        extra = {"seed": self.seed, "ignore_eos": self.ignore_eos}
        return Question([Message("user", self.text)], self.max_tokens, extra)


@dataclass(slots=True)
class ChatResult:
    """What one client saw: seconds from asking to each chunk of text, and the usage that the server tells."""

    text: str = ""
    chunk_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_output: int = 0
    finish_reason: str | None = None

    @classmethod
    def of(cls, answer: Answer) -> "ChatResult":
        """raises MachineError where the answer is no answer"""
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
        """Mean time from one token to the next: a chunk holds all tokens that were ready together."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(self.n_output - 1, 1)

    @property
    def pauses_s(self) -> list[float]:
        """Between chunks of text."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def ask(url: str, asked: DemoChatRequest, show: Callable[[str], None] | None = None) -> ChatResult:
    """Sends one request and reads its stream to the end. raises MachineError where the answer is no answer"""

    async def asking() -> Answer:
        async with Client(_target(url)) as client:
            return await client.ask(asked.question(), on_text=show)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return ChatResult.of(runner.run(asking()))


def ask_all(url: str, asks: Sequence[DemoChatRequest], concurrency: int) -> tuple[list[ChatResult], float]:
    """All requests, so many at a time; and the seconds that took. raises MachineError where an answer is no answer"""

    async def asking() -> list[Answer]:
        async with Client(_target(url)) as client:
            places = asyncio.Semaphore(concurrency)

            async def one(asked: DemoChatRequest) -> Answer:
                async with places:
                    return await client.ask(asked.question())

            return await asyncio.gather(*map(one, asks))

    start_s = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(asking())
    return [ChatResult.of(answer) for answer in answers], time.perf_counter() - start_s


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _target(url: str) -> Target:
    return Target(url, CHAT, timeout_s=TIMEOUT_S, keep_text=True)
