"""Runs a load, closed loop or open loop, until a count or a duration is reached, and records every request.

Records have the intended and the actual send time, so latencies can include delays in the client (no free slot, or a
busy client).
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
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest, Failure
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.inputs import Session, Turn

FAILURES_IN_A_ROW = 100  # end the run: the server is gone
MAX_AT_A_TIME = 65_536
_NEVER = 1 << 30  # collections of the middle generation before a full collection


@dataclass(frozen=True, slots=True)
class RunLoad:
    """A load. With `concurrency` alone: a closed loop of that many sessions. With `arrivals`: an open loop with at most
    `concurrency` sessions at a time. With neither: sessions start at their `at_s`."""

    concurrency: int | None = None
    arrivals: Arrivals | None = None
    n_sessions: int | None = None
    duration_s: float | None = None  # no session starts later; running ones are completed
    ramp_s: float = 0.0  # closed loop: clients start one after another within this time
    cancel_share: float = 0.0  # share of requests to cancel
    cancel_after_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class TurnRecord:
    """One request: the turn that was sent, and its outcome."""

    turn: Turn
    answer: BenchRecord
    session: int
    number: int  # of the turn
    label: str = ""


class BenchClient(Protocol):
    """The target of a run: a server over HTTP (`client.py`), or an engine in this process (`in_process.py`)."""

    async def ask(self, question: BenchRequest, answer: BenchRecord | None = None) -> BenchRecord:
        """Send a request and fill `answer`, including failures. Only cancellation raises."""


class Run:
    """A run of a load. records: in order of completion; ended: why it ended early, "" otherwise; wall_s: duration

    share: CPU share of the client; late_s: start delay of each request that had a free slot
    """

    def __init__(self, client: BenchClient, load: RunLoad, extra: Mapping[str, object] | None = None) -> None:
        """extra: fields of every request's body"""
        self.load, self.records, self.ended, self.n_running, self.started_s = load, list[TurnRecord](), "", 0, 0.0
        self.wall_s, self.share, self.late_s = 0.0, CoreShare(), list[float]()
        self._client, self._extra = client, extra or {}
        self._tasks, self._failed_in_a_row, self._n_begun = set[asyncio.Task[None]](), 0, 0

    async def drive(self, sessions: Iterator[Session]) -> None:
        """Run until the load is done, `sessions` are exhausted, or `stop` is called. A run that has `ended` sends
        nothing."""
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
                        task.result()  # a bug, or an error while reading a file, ends the run
        finally:
            self.stop("interrupted")
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.wall_s = self.share.stop()

    def stop(self, reason: str) -> None:
        """Stop sending, and cancel the running requests."""
        if self._tasks:
            self.ended = self.ended or reason
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
        """Run sessions one after another, as one of `concurrency` users."""
        await _until(self.started_s + i * self.load.ramp_s / (self.load.concurrency or 1))
        while (numbered := self._next(sessions)) is not None:
            await self._session(*numbered, time.perf_counter())

    async def _arrive(self, sessions: Iterator[Session]) -> None:
        load = self.load
        places = asyncio.Semaphore(load.concurrency or MAX_AT_A_TIME)
        times = load.arrivals.times(random.Random(f"{load.seed}/arrivals")) if load.arrivals else None
        while (numbered := self._next(sessions)) is not None:
            due_s = self.started_s + (next(times) if times is not None else numbered[1].at_s or 0.0)
            if self._is_over(due_s):
                return
            await _until(due_s)
            if len(self._tasks) > MAX_AT_A_TIME:
                return self.stop(f"{MAX_AT_A_TIME} requests wait for an answer: the server does not keep up")
            self._spawn(self._run_in_slot(places, *numbered, due_s))
        return None

    async def _run_in_slot(self, places: asyncio.Semaphore, number: int, session: Session, due_s: float) -> None:
        has_place = not places.locked()
        async with places:
            if has_place:  # without waiting for a slot, the delay is the client's own
                self.late_s.append(time.perf_counter() - due_s)
            await self._session(number, session, due_s)

    async def _session(self, number: int, session: Session, due_s: float) -> None:
        messages: list[BenchMessage] = []
        for i, turn in enumerate(session.turns):
            if i:
                due_s = time.perf_counter() + turn.pause_s
                await _until(due_s)
                self.late_s.append(time.perf_counter() - due_s)
                if self.ended or self._is_over(due_s):
                    return
            messages += [BenchMessage(*message) for message in turn.history]
            messages.append(BenchMessage("user", turn.text))
            record = TurnRecord(turn, BenchRecord(intended_s=due_s), number, i, session.label)
            n_input = turn.n_input if len(messages) == 1 else None
            await self._ask(BenchRequest(tuple(messages), turn.max_tokens, self._extra, n_input), record)
            if record.answer.failure is not None:
                return
            messages.append(BenchMessage("assistant", record.answer.text))

    async def _ask(self, question: BenchRequest, record: TurnRecord) -> None:
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

    def _keep(self, record: TurnRecord) -> None:
        self.records.append(record)
        failure = record.answer.failure
        self._failed_in_a_row = 0 if failure in (None, Failure.CANCELLED) else self._failed_in_a_row + 1
        if self._failed_in_a_row == FAILURES_IN_A_ROW:
            self.stop(f"{FAILURES_IN_A_ROW} requests in a row failed, the last one: {record.answer.detail}")


@contextmanager
def _without_long_collections() -> Iterator[None]:
    """Disable full garbage collections: they block for half a second or more, which delays the timestamps of about 3 %
    of the answers."""
    young = gc.get_threshold()
    gc.set_threshold(*young[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*young)


async def _until(due_s: float) -> None:
    """Sleep until a time; timers have millisecond resolution, so the rest is waited for in loop iterations."""
    while (left_s := due_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)
