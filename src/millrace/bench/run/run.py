"""Drives a load: so many at a time, or as they arrive, until a count or a time is reached; keeps every answer.

What was intended stands beside what was done: a request that had to wait here (for a place, or because this client was
busy) counts from when it should have been sent, too.
"""

import asyncio
import gc
import random
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from millrace.bench.client.core_share import CoreShare
from millrace.bench.client.request_record import Answer, Failure, Message, Question
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.inputs import Session, Turn

FAILURES_IN_A_ROW = 100  # then the run ends: the server is gone
MOST_AT_A_TIME = 65_536
_NEVER = 1 << 30  # passes over the middle generation until the next over all


@dataclass(frozen=True, slots=True)
class Load:
    """concurrency alone: so many sessions at a time, each followed by the next. arrivals: they come on their own, at
    most `concurrency` of them at a time; with neither, sessions that say when (`at_s`) come then."""

    concurrency: int | None = None
    arrivals: Arrivals | None = None
    n_sessions: int | None = None
    duration_s: float | None = None  # none begins later; those that run are waited for
    ramp_s: float = 0.0  # of concurrency: clients begin one after the other within this time
    cancel_share: float = 0.0  # of requests, that are cancelled
    cancel_after_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Record:
    """One request: what was wanted, and what came back."""

    turn: Turn
    answer: Answer
    session: int
    number: int  # of the turn
    label: str = ""


class BenchClient(Protocol):
    """The target of a run: a server over HTTP (`client.py`), or an engine in this process (`in_process.py`)."""

    async def ask(self, question: Question, answer: Answer | None = None) -> Answer:
        """Fills `answer`; failures are in it. Only a cancel raises."""


class Run:
    """records: in the order in which answers ended; ended: why it ended before its time, else ""; wall_s: that it took;
    share: of a core, that it cost; late_s: of each request that had a place, how much later than due it was begun"""

    def __init__(self, client: BenchClient, load: Load, extra: Mapping[str, object] | None = None) -> None:
        """extra: fields of every request's body"""
        self.load, self.records, self.ended, self.n_running, self.started_s = load, list[Record](), "", 0, 0.0
        self.wall_s, self.share, self.late_s = 0.0, CoreShare(), list[float]()
        self._client, self._extra = client, extra or {}
        self._tasks, self._failed_in_a_row, self._n_begun = set[asyncio.Task[None]](), 0, 0

    async def drive(self, sessions: Iterator[Session]) -> None:
        """Until the load is done, or `sessions` are, or `stop` is called. What was sent is in `records`.

        A run that has `ended` before sends nothing.
        """
        if self.ended:
            return
        with _without_long_collections():
            await self._drive(sessions)

    async def _drive(self, sessions: Iterator[Session]) -> None:
        self.started_s = time.perf_counter()
        self.share.start()
        if self.load.concurrency is None or self.load.arrivals is not None:
            self._spawn(self._arrive(sessions))
        else:
            for i in range(self.load.concurrency):
                self._spawn(self._client_of(i, sessions))
        try:
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():
                        task.result()  # a mistake of ours, or of a file in the middle of its reading, ends the run
        finally:
            self.stop("interrupted")
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.wall_s = self.share.stop()

    def stop(self, why: str) -> None:
        """Nothing more is sent, and what runs is given up."""
        if self._tasks:
            self.ended = self.ended or why
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next(self, sessions: Iterator[Session]) -> tuple[int, Session] | None:
        if self.ended or self._n_begun == self.load.n_sessions or self._is_over(time.perf_counter()):
            return None
        session = next(sessions, None)
        if session is None:
            return None
        self._n_begun += 1
        return self._n_begun - 1, session

    def _is_over(self, at_s: float) -> bool:
        return self.load.duration_s is not None and at_s - self.started_s >= self.load.duration_s

    async def _client_of(self, i: int, sessions: Iterator[Session]) -> None:
        """One of `concurrency` users: a session, and then the next."""
        await _until(self.started_s + i * self.load.ramp_s / (self.load.concurrency or 1))
        while (found := self._next(sessions)) is not None:
            await self._session(*found, time.perf_counter())

    async def _arrive(self, sessions: Iterator[Session]) -> None:
        load = self.load
        places = asyncio.Semaphore(load.concurrency or MOST_AT_A_TIME)
        times = load.arrivals.times(random.Random(f"{load.seed}/arrivals")) if load.arrivals else None
        while (found := self._next(sessions)) is not None:
            due_s = self.started_s + (next(times) if times is not None else found[1].at_s or 0.0)
            if self._is_over(due_s):
                return
            await _until(due_s)
            if len(self._tasks) > MOST_AT_A_TIME:
                return self.stop(f"{MOST_AT_A_TIME} requests wait for an answer: the server does not keep up")
            self._spawn(self._placed(places, *found, due_s))
        return None

    async def _placed(self, places: asyncio.Semaphore, number: int, session: Session, due_s: float) -> None:
        has_place = not places.locked()
        async with places:
            if has_place:  # what is not waited for a place is this client's own lateness
                self.late_s.append(time.perf_counter() - due_s)
            await self._session(number, session, due_s)

    async def _session(self, number: int, session: Session, due_s: float) -> None:
        said: list[Message] = []
        for i, turn in enumerate(session.turns):
            if i:
                due_s = time.perf_counter() + turn.pause_s
                await _until(due_s)
                self.late_s.append(time.perf_counter() - due_s)
                if self.ended or self._is_over(due_s):
                    return
            said += [Message(*one) for one in turn.history]
            said.append(Message("user", turn.text))
            record = Record(turn, Answer(intended_s=due_s), number, i, session.label)
            n_input = turn.n_input if len(said) == 1 else None
            await self._ask(Question(tuple(said), turn.max_tokens, self._extra, n_input), record)
            if record.answer.failure is not None:
                return
            said.append(Message("assistant", record.answer.text))

    async def _ask(self, question: Question, record: Record) -> None:
        load, answer = self.load, record.answer
        chance = random.Random(f"{load.seed}/cancel/{record.session}/{record.number}").random()
        self.n_running += 1
        try:
            async with asyncio.timeout(load.cancel_after_s if chance < load.cancel_share else None):
                await self._client.ask(question, answer)
        except TimeoutError:
            answer.fail(Failure.CANCELLED, f"after {load.cancel_after_s:g} s, as it was to be")
        except asyncio.CancelledError:
            answer.fail(Failure.INTERRUPTED, self.ended)
            raise
        finally:
            self.n_running -= 1
            answer.end_s = answer.end_s or time.perf_counter()
            self._keep(record)

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        failure = record.answer.failure
        self._failed_in_a_row = 0 if failure in (None, Failure.CANCELLED) else self._failed_in_a_row + 1
        if self._failed_in_a_row == FAILURES_IN_A_ROW:
            self.stop(f"{FAILURES_IN_A_ROW} requests in a row failed, the last one: {record.answer.detail}")


@contextmanager
def _without_long_collections() -> Iterator[None]:
    """Python's collector passes over the young alone: over everything that a process holds it takes half a second and
    more, in which no stamp is taken, and 3 % of the answers seem to come that much later."""
    young = gc.get_threshold()
    gc.set_threshold(*young[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*young)


async def _until(due_s: float) -> None:
    """Timers end at whole milliseconds; what is left of one is waited for in turns of the loop."""
    while (left_s := due_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)
