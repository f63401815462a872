"""An encoder at work: texts of many requests packed into steps, in one thread.

A text's vector has the same bits whatever is computed beside it, so requests take turns, a text at a time: whoever asks
for one vector does not wait until somebody else's thousand are done.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.engine.artifact.engine import Engine
from millrace.engine.encoder_inputs import Ids, text_inputs
from millrace.errors import EngineError, MillraceError, RequestError, engine_stopped_error
from millrace.runtime.engine_thread import EngineThread

Vectors = NDArray[np.float32]  # (texts, width)
Step = list[tuple["EmbeddingJob", int]]  # and which of its texts
MAX_INPUTS = 2048  # of one request, as at OpenAI's endpoint
ALL = -1  # truncate_prompt_tokens: to as many as the model takes

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


def checked_ids(ids: Sequence[int], limits: EncoderLimits, which: str, param: str | None = None) -> Ids:
    """The token ids of one text. raises RequestError where there are none or too many, or one is out of range

    which: of several, for the message
    """
    if len(ids) > limits.max_context:
        raise RequestError(
            f"{which} has {len(ids)} tokens", f"at most {limits.max_context}, the positions of this engine",
            "shorten it, or give truncate_prompt_tokens; or build with a larger --max-context, where the model has it",
            param,
        )  # fmt: skip
    if len(ids) == 0:
        raise RequestError(f"{which} has no tokens", "at least 1", "send some text", param)
    wide = np.asarray(ids) if all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids) else None
    if wide is None or wide.dtype.kind not in "iu":
        raise RequestError(f"{which} is not a list of token ids", "integers", "send token ids or text", param)
    outside = np.flatnonzero((wide < 0) | (wide >= limits.vocab_size))
    if outside.size:
        at = int(outside[0])
        raise RequestError(
            f"token {at} of {which} is {int(wide[at])}", f"a token id from 0 to {limits.vocab_size - 1}",
            "tokenise the text with this model's own tokenizer", param,
        )  # fmt: skip
    return wide.astype(np.int32)


def truncated(ids: Sequence[int], most: int, around: tuple[int, int]) -> Sequence[int]:
    """The first tokens of a text, between the special ones around it, where it has more than `most` in all."""
    behind = around[1] if sum(around) <= most else 0
    return ids if len(ids) <= most else [*ids[: most - behind], *ids[len(ids) - behind :]]


def truncation(limit: int | None, max_context: int) -> int | None:
    """How many tokens of a text are read at most; None: all, and too many are an error. raises RequestError"""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or not (limit == ALL or 1 <= limit <= max_context):
        raise RequestError(
            f"truncate_prompt_tokens is {limit!r:.60}", f"1 to {max_context}, or -1 for {max_context}", "correct it",
            param="truncate_prompt_tokens",
        )  # fmt: skip
    return max_context if limit == ALL else limit


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


class EncoderExecutor(Protocol):
    """An encoder's, on a CPU or a GPU."""

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """raises RuntimeError, MillraceError where it fails"""

    def close(self) -> None: ...


def _nothing() -> None:
    return


class EncoderLoop:
    """Runs an encoder's network for many requests, in a thread of its own from `start` to `stop`."""

    def __init__(
        self, network: EncoderExecutor, limits: EncoderLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits, self.thread = limits, EngineThread(clock)
        self._network = network
        self._steps = self._texts = self._tokens = 0  # guarded, as all below, by thread.changed
        self._busy_s = 0.0
        self._jobs: deque[EmbeddingJob] = deque()
        self._waiting = self._waiting_tokens = 0
        self._step: Step = []  # which runs
        self._again: list[Step] = []  # of one that failed: each of its requests alone, the last goes first
        self._ended: Callable[[], None] = _nothing

    def submit(self, texts: Sequence[Ids]) -> EmbeddingJob:
        """Queue the texts, as checked_ids() gives them; the job's future has their vectors, in the same order.

        raises BusyError where the loop has stopped; the future, EngineError where a step failed
        """
        job = EmbeddingJob(texts, self.limits.width)
        if not texts:
            job.future.set_result(job.vectors)
            return job
        with self.thread.changed:
            self.thread.check_open()
            if self._is_idle():
                self.thread.record_progress()
            self._jobs.append(job)
            self._waiting += len(texts)
            self._waiting_tokens += sum(map(len, texts))
            self.thread.changed.notify()
        return job

    def stats(self) -> EncoderStats:
        """A snapshot, cheap enough for every request."""
        with self.thread.changed:
            return EncoderStats(
                requests=len(self._jobs), waiting=self._waiting, waiting_tokens=self._waiting_tokens,
                steps_total=self._steps,
                texts_total=self._texts, tokens_total=self._tokens, busy_s=self._busy_s,
                last_step_s=self.thread.seconds_since_progress,
                idle=self._is_idle(), healthy=not self.thread.dead_because,
            )  # fmt: skip

    def start(self, ended: Callable[[], None] = _nothing) -> None:
        """ended: called by its thread at its end, or by whoever abandons it"""
        self._ended = ended
        self.thread.start(self._run)

    def stop(self) -> None:
        """End the thread after the step in progress; what is unfinished ends with BusyError."""
        self.thread.stop()

    def abandon(self) -> None:
        """Leaves a step behind that does not end: nobody waits for it any more."""
        self._end("a step does not end")

    # ------------------------------------------------------------------ for the engine thread

    def _run(self) -> None:
        thread, why = self.thread, "a defect in the encoder's loop"  # unless it ends in an orderly way
        try:
            while not thread.dead_because:
                with thread.changed:
                    while not (self._jobs or self._again or thread.stopping):
                        thread.changed.wait()
                    if thread.stopping:
                        break
                    self._step = self._again.pop() if self._again else self._gather()
                if self._step:
                    self._run_step(self._step)
            why = thread.dead_because
        finally:  # whatever happened, nobody waits for ever
            self._end(why)

    def _is_idle(self) -> bool:
        return not (self._jobs or self._step or self._again)

    def _gather(self) -> Step:
        """The next step: a text of each request in turn, until one does not fit; without what was cancelled."""
        step: Step = []
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

    def _run_step(self, step: Step) -> None:
        texts, started_s = [job.texts[number] for job, number in step], self.thread.clock()
        try:
            vectors = self._network.run(text_inputs(texts, self.limits.inputs))["embeddings"]
        except (RuntimeError, MillraceError) as error:  # what the native core raises
            self._step_failed(step, error)
        else:
            self.thread.step_done()
            self._distribute(step, vectors)
            with self.thread.changed:
                self._texts += len(texts)
                self._tokens += sum(map(len, texts))
        with self.thread.changed:
            self._steps += 1
            self._step = []
            self.thread.record_progress()
            self._busy_s += self.thread.clock() - started_s

    def _distribute(self, step: Step, vectors: NDArray[np.generic]) -> None:
        finite = np.isfinite(vectors).all(axis=1)
        for (job, number), vector, good in zip(step, vectors, finite, strict=True):
            job.vectors[number] = vector
            job.n_missing, job.n_tokens_done = job.n_missing - 1, job.n_tokens_done + len(job.texts[number])
            if not good:
                _settle(job, _failed(f"the vector of text {number} is not finite"))
            elif job.n_missing == 0:
                _settle(job, None)

    def _step_failed(self, step: Step, error: Exception) -> None:
        """Which of its requests it was shows when each is computed alone: that one fails."""
        alone: dict[EmbeddingJob, Step] = {}
        for job, number in step:
            alone.setdefault(job, []).append((job, number))
        if len(alone) > 1:
            log.warning("a step of %d requests failed; each is computed alone", len(alone), exc_info=error)
            with self.thread.changed:
                self._again = list(alone.values())[::-1]
            return
        for job in alone:
            _settle(job, _failed(f"the step that computed this request failed: {error}"))
        self.thread.step_failed(f"a step of {len(step)} texts", error, self._check)

    def _check(self) -> None:
        """A text of one token."""
        self._network.run(text_inputs([np.zeros(1, np.int32)], self.limits.inputs))

    def _end(self, why: str) -> None:
        """Nobody who waits is forgotten. why: what went wrong, "" where it is only being closed"""
        with self.thread.changed:
            self.thread.dead_because = why
            jobs = [*(job for step in (self._step, *self._again) for job, _ in step), *self._jobs]
            self._step, self._again, self._jobs = [], [], deque()
            self._waiting = self._waiting_tokens = 0
        for job in jobs:
            _settle(job, engine_stopped_error(why))
        self._ended()


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
