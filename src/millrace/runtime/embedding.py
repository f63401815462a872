"""An encoder at work: texts of many requests packed into steps, in one thread.

A text's vector has the same bits whatever is computed beside it, so requests take turns, a text at a time: whoever asks
for one vector does not wait until somebody else's thousand are done.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.engine.engine import Engine
from millrace.engine.native import NativeNetwork
from millrace.engine.texts import Ids, text_inputs
from millrace.errors import BusyError, EngineError, MillraceError

MAX_FAILURES_IN_A_ROW = 3
Vectors = NDArray[np.float32]  # (texts, width)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """What the engine was built for."""

    inputs: tuple[str, ...]  # the names of what the network takes
    max_step_tokens: int
    max_texts: int  # of one step
    max_context: int  # tokens of one text
    vocab_size: int
    width: int  # of a vector

    @classmethod
    def of(cls, engine: Engine) -> "EncoderLimits":
        m = engine.manifest
        width = m.cpu.outputs[m.gives.index("embeddings")].shape[1]
        assert isinstance(width, int)
        return cls(
            inputs=tuple(slot.name for slot in m.cpu.inputs),
            max_step_tokens=m.max_step_tokens, max_texts=m.max_sequences,
            max_context=min(m.max_context, m.max_step_tokens), vocab_size=m.vocab_size, width=width,
        )  # fmt: skip


class EmbeddingJob:
    """The texts of one request. Whoever cancels its future takes its texts out of the queue."""

    def __init__(self, texts: Sequence[Ids], width: int) -> None:
        self.texts = texts
        self.vectors = np.empty((len(texts), width), np.float32)
        self.future: Future[Vectors] = Future()
        self.n_missing, self.n_tokens_done = len(texts), 0
        # the next text is the last of these: long ones go first, and short ones fill up the steps
        self.waiting = sorted(range(len(texts)), key=lambda i: len(texts[i]))


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """`requests`: with such texts; `waiting`: texts whose step has not begun; `idle`: none is there at all."""

    requests: int
    waiting: int
    waiting_tokens: int
    steps_total: int
    texts_total: int
    tokens_total: int
    busy_s: float  # of all steps together
    last_step_s: float  # since the last step ended, or work came
    idle: bool
    healthy: bool


class EncoderLoop:
    """Runs an encoder's network for many requests, in a thread of its own from `start` to `stop`."""

    def __init__(
        self, network: NativeNetwork, limits: EncoderLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits = limits
        self._network, self._clock = network, clock
        self._thread: threading.Thread | None = None
        self._failures = 0  # in a row; of the thread alone
        self._changed = threading.Condition()  # guards all below
        self._steps = self._texts = self._tokens = 0
        self._busy_s = 0.0
        self._jobs: deque[EmbeddingJob] = deque()
        self._waiting = self._waiting_tokens = 0
        self._step: list[tuple[EmbeddingJob, int]] = []  # which runs
        self._stopping = False
        self._dead_because = ""
        self._progress_s = clock()

    @property
    def running_in_thread(self) -> bool:
        return self._thread is not None

    @property
    def in_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def submit(self, texts: Sequence[Ids]) -> EmbeddingJob:
        """Queue the texts, as checked_ids() gives them; the job's future has their vectors, in the same order.

        raises BusyError where the loop has stopped; the future, EngineError where a step failed
        """
        job = EmbeddingJob(texts, self.limits.width)
        if not texts:
            job.future.set_result(job.vectors)
            return job
        with self._changed:
            if self._stopping or self._dead_because:
                raise _stopped(self._dead_because)
            if not self._jobs and not self._step:
                self._progress_s = self._clock()  # waiting for work was no lack of progress
            self._jobs.append(job)
            self._waiting += len(texts)
            self._waiting_tokens += sum(map(len, texts))
            self._changed.notify()
        return job

    def stats(self) -> EncoderStats:
        """A snapshot, cheap enough for every request."""
        with self._changed:
            return EncoderStats(
                requests=len(self._jobs), waiting=self._waiting, waiting_tokens=self._waiting_tokens,
                steps_total=self._steps,
                texts_total=self._texts, tokens_total=self._tokens, busy_s=self._busy_s,
                last_step_s=self._clock() - self._progress_s,
                idle=not self._jobs and not self._step, healthy=not self._dead_because,
            )  # fmt: skip

    def start(self) -> None:
        assert self._thread is None, "the loop is already running"
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millrace-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress; what is unfinished ends with BusyError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Leaves a step behind that does not end: nobody waits for it any more."""
        self._end("a step does not end")

    # ------------------------------------------------------------------ for the engine thread

    def _run(self) -> None:
        why = "a defect in the encoder's loop"  # unless it ends in an orderly way
        try:
            while not self._dead_because:
                with self._changed:
                    while not self._jobs and not self._stopping:
                        self._changed.wait()
                    if self._stopping:
                        break
                    self._step = self._gather()
                if self._step:
                    self._run_step(self._step)
            why = self._dead_because
        finally:  # whatever happened, nobody waits for ever
            self._end(why)

    def _gather(self) -> list[tuple[EmbeddingJob, int]]:
        """The next step: a text of each request in turn, until one does not fit; without what was cancelled."""
        step: list[tuple[EmbeddingJob, int]] = []
        room = self.limits.max_step_tokens
        while self._jobs and len(step) < self.limits.max_texts:
            job = self._jobs[0]
            gone = job.future.done()
            n = len(job.texts[job.waiting[-1]])
            if n > room and not gone:
                break
            self._jobs.popleft()
            left = job.waiting if gone else [job.waiting.pop()]
            self._waiting -= len(left)
            self._waiting_tokens -= sum(len(job.texts[i]) for i in left)
            if gone:
                continue
            room -= n
            step.append((job, left[0]))
            if job.waiting:
                self._jobs.append(job)
        return step

    def _run_step(self, step: Sequence[tuple[EmbeddingJob, int]]) -> None:
        texts, started_s = [job.texts[number] for job, number in step], self._clock()
        try:
            vectors = self._network.run(text_inputs(texts, self.limits.inputs))["embeddings"]
        except (RuntimeError, MillraceError) as error:  # what the native core raises
            self._step_failed(step, error)
        else:
            self._failures = 0
            self._distribute(step, vectors)
        with self._changed:
            self._steps += 1
            self._texts += len(texts)
            self._tokens += sum(map(len, texts))
            self._step, self._progress_s = [], self._clock()
            self._busy_s += self._progress_s - started_s

    def _distribute(self, step: Sequence[tuple[EmbeddingJob, int]], vectors: NDArray[np.generic]) -> None:
        finite = np.isfinite(vectors).all(axis=1)
        for (job, number), vector, good in zip(step, vectors, finite, strict=True):
            job.vectors[number] = vector
            job.n_missing, job.n_tokens_done = job.n_missing - 1, job.n_tokens_done + len(job.texts[number])
            if not good:
                _settle(job, _failed(f"the vector of text {number} is not finite"))
            elif job.n_missing == 0:
                _settle(job, None)

    def _step_failed(self, step: Sequence[tuple[EmbeddingJob, int]], error: Exception) -> None:
        self._failures += 1
        log.error("a step of %d texts failed, %d in a row", len(step), self._failures, exc_info=error)
        for job, _ in step:
            _settle(job, _failed(f"the step that computed this request failed: {error}"))
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            self._dead_because = f"{self._failures} steps in a row failed, the last with: {error}"

    def _end(self, why: str) -> None:
        """Nobody who waits is forgotten. why: what went wrong, "" where it is only being closed"""
        with self._changed:
            self._dead_because = why
            jobs = [*(job for job, _ in self._step), *self._jobs]
            self._step, self._jobs = [], deque()
            self._waiting = self._waiting_tokens = 0
        for job in jobs:
            _settle(job, _stopped(why))


def _settle(job: EmbeddingJob, trouble: MillraceError | None) -> None:
    """Gives the vectors to who waits, or says why there are none; unless that was said already, or nobody waits."""
    if job.future.done() or not job.future.set_running_or_notify_cancel():
        return
    if trouble is None:
        job.future.set_result(job.vectors)
    else:
        job.future.set_exception(trouble)


def _failed(why: str) -> EngineError:
    return EngineError(why, "a vector for each text", "try again; the log says more")


def _stopped(why: str) -> BusyError:
    what = f"the engine has stopped: {why or 'it is being closed'}"
    return BusyError(what, "a running engine", "restart it; its log says more" if why else "ask again when it runs")
