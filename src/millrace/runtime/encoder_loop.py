"""The loop of an encoder: packs the texts of many requests into steps, in one thread.

The bits of a text's vector do not depend on the other texts of its step. So requests take turns, one text at a time: a
request for one vector does not wait for another request's thousand. Of a cross-encoder a text is a pair of texts, and
its vector one number, the score.
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
from millrace.model.module import CROSS_ENCODER, ENCODER
from millrace.runtime.engine_thread import EngineThread

Vectors = NDArray[np.float32]  # (texts, width)
Step = list[tuple["EmbeddingJob", int]]  # each with the index of its text
MAX_INPUTS = 2048  # of one request, OpenAI's limit
ALL = -1  # truncate_prompt_tokens: to the largest number that the model takes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """The limits that the engine was built with."""

    inputs: tuple[str, ...]  # names of the model's inputs
    max_step_tokens: int
    max_texts: int  # per step
    max_context: int  # tokens per text
    vocab_size: int
    width: int  # of a vector
    output: str = "embeddings"  # name of the model's output; of a cross-encoder "scores"

    @classmethod
    def from_engine(cls, engine: Engine) -> "EncoderLimits":
        m = engine.manifest
        (output,) = (CROSS_ENCODER if m.is_cross_encoder else ENCODER).outputs
        width = m.cpu.outputs[m.gives.index(output)].shape[1]
        assert isinstance(width, int)
        return cls(
            inputs=tuple(slot.name for slot in m.cpu.inputs), output=output,
            max_step_tokens=m.max_step_tokens, max_texts=m.max_sequences,
            max_context=min(m.max_context, m.max_step_tokens), vocab_size=m.vocab_size, width=width,
        )  # fmt: skip


def check_ids(ids: Sequence[int], limits: EncoderLimits, label: str, param: str | None = None) -> Ids:
    """Return the token ids of one text. raises RequestError if there are none or too many, or if one is out of range

    label: name of the text in error messages
    """
    if len(ids) > limits.max_context:
        raise RequestError(
            f"{label} has {len(ids)} tokens", f"at most {limits.max_context}, the positions of this engine",
            "shorten it, or give truncate_prompt_tokens; or build with a larger --max-context, where the model has it",
            param,
        )  # fmt: skip
    if len(ids) == 0:
        raise RequestError(f"{label} has no tokens", "at least 1", "send some text", param)
    wide = np.asarray(ids) if all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids) else None
    if wide is None or wide.dtype.kind not in "iu":
        raise RequestError(f"{label} is not a list of token ids", "integers", "send token ids or text", param)
    outside = np.flatnonzero((wide < 0) | (wide >= limits.vocab_size))
    if outside.size:
        at = int(outside[0])
        raise RequestError(
            f"token {at} of {label} is {int(wide[at])}", f"a token id from 0 to {limits.vocab_size - 1}",
            "tokenise the text with this model's own tokenizer", param,
        )  # fmt: skip
    return wide.astype(np.int32)


def truncate_ids(ids: Sequence[int], max_tokens: int, n_special: tuple[int, int]) -> Sequence[int]:
    """Return the first tokens of a text and the special tokens around it, at most `max_tokens`."""
    n_end = n_special[1] if sum(n_special) <= max_tokens else 0
    return ids if len(ids) <= max_tokens else [*ids[: max_tokens - n_end], *ids[len(ids) - n_end :]]


def truncation(limit: int | None, max_context: int) -> int | None:
    """Return the limit on the tokens of a text; None: longer texts are an error. raises RequestError"""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or not (limit == ALL or 1 <= limit <= max_context):
        raise RequestError(
            f"truncate_prompt_tokens is {limit!r:.60}", f"1 to {max_context}, or -1 for {max_context}", "correct it",
            param="truncate_prompt_tokens",
        )  # fmt: skip
    return max_context if limit == ALL else limit


class EmbeddingJob:
    """The texts of one request. Canceling its future removes its texts from the queue."""

    def __init__(self, texts: Sequence[Ids], width: int, n_first: Sequence[int] | None = None) -> None:
        self.texts = texts
        self.n_first = [len(ids) for ids in texts] if n_first is None else n_first
        self.vectors = np.empty((len(texts), width), np.float32)
        self.future: Future[Vectors] = Future()
        self.n_missing, self.n_tokens_done = len(texts), 0
        # taken from the end: long texts first, then short ones fill the steps
        self.waiting = sorted(range(len(texts)), key=lambda i: len(texts[i]))


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """requests: with unfinished texts; waiting: texts whose step has not begun; idle: there are no requests"""

    requests: int
    waiting: int
    waiting_tokens: int
    steps_total: int
    texts_total: int
    tokens_total: int
    busy_s: float  # total over all steps
    last_step_s: float  # since the last step ended, or since work arrived at an idle loop
    idle: bool
    healthy: bool


class EncoderExecutor(Protocol):
    """The executor of an encoder, on a CPU or a GPU."""

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Run a step. raises RuntimeError, MillraceError if it fails"""

    def close(self) -> None: ...


def _nothing() -> None:
    return


class EncoderLoop:
    """Runs an encoder for many requests, in a thread of its own from `start` to `stop`."""

    def __init__(
        self, network: EncoderExecutor, limits: EncoderLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits, self.thread = limits, EngineThread(clock)
        self._executor = network
        self._steps = self._texts = self._tokens = 0  # this and all below are guarded by thread.changed
        self._busy_s = 0.0
        self._jobs: deque[EmbeddingJob] = deque()
        self._waiting = self._waiting_tokens = 0
        self._step: Step = []  # in progress
        self._retries: list[Step] = []  # a failed step, split by request; the last is run first
        self._on_end: Callable[[], None] = _nothing

    def submit(self, texts: Sequence[Ids], n_first: Sequence[int] | None = None) -> EmbeddingJob:
        """Queue texts that check_ids() has checked; the job's future gives their vectors, in the same order.

        n_first: number of each text's first tokens that have type 0, as PairTemplate.join returns it; None: all
        raises BusyError if the loop has stopped; the future raises EngineError if a step failed
        """
        job = EmbeddingJob(texts, self.limits.width, n_first)
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
        """Start the thread. ended: called by the thread when it ends, or by `abandon`"""
        self._on_end = ended
        self.thread.start(self._run)

    def stop(self) -> None:
        """End the thread after the step in progress; unfinished requests end with BusyError."""
        self.thread.stop()

    def abandon(self) -> None:
        """End all requests although a step does not finish."""
        self._end("a step does not end")

    # ------------------------------------------------------------------ for the engine thread

    def _run(self) -> None:
        thread, reason = self.thread, "a defect in the encoder's loop"  # of the end, unless it is orderly
        try:
            while not thread.dead_because:
                with thread.changed:
                    while not (self._jobs or self._retries or thread.stopping):
                        thread.changed.wait()
                    if thread.stopping:
                        break
                    self._step = self._retries.pop() if self._retries else self._gather()
                if self._step:
                    self._run_step(self._step)
            reason = thread.dead_because
        finally:  # in any case, no client waits forever
            self._end(reason)

    def _is_idle(self) -> bool:
        return not (self._jobs or self._step or self._retries)

    def _gather(self) -> Step:
        """Return the next step: one text of each request in turn, until one does not fit. Skip canceled requests."""
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
            n_first = [job.n_first[number] for job, number in step]
            vectors = self._executor.run(text_inputs(texts, self.limits.inputs, n_first))[self.limits.output]
        except (RuntimeError, MillraceError) as error:  # raised by the native executor
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
        """Retry each request of a failed step alone, to find the one that fails."""
        alone: dict[EmbeddingJob, Step] = {}
        for job, number in step:
            alone.setdefault(job, []).append((job, number))
        if len(alone) > 1:
            log.warning("a step of %d requests failed; each is computed alone", len(alone), exc_info=error)
            with self.thread.changed:
                self._retries = list(alone.values())[::-1]
            return
        for job in alone:
            _settle(job, _failed(f"the step that computed this request failed: {error}"))
        self.thread.step_failed(f"a step of {len(step)} texts", error, self._check)

    def _check(self) -> None:
        """Compute a text of one token."""
        self._executor.run(text_inputs([np.zeros(1, np.int32)], self.limits.inputs))

    def _end(self, reason: str) -> None:
        """End every waiting request. reason: the error, or "" for an orderly end"""
        with self.thread.changed:
            self.thread.dead_because = reason
            jobs = [*(job for step in (self._step, *self._retries) for job, _ in step), *self._jobs]
            self._step, self._retries, self._jobs = [], [], deque()
            self._waiting = self._waiting_tokens = 0
        for job in jobs:
            _settle(job, engine_stopped_error(reason))
        self._on_end()


def _settle(job: EmbeddingJob, error: MillraceError | None) -> None:
    """Set the job's vectors or its error, unless the future is done or canceled."""
    if job.future.done() or not job.future.set_running_or_notify_cancel():
        return
    if error is None:
        job.future.set_result(job.vectors)
    else:
        job.future.set_exception(error)


def _failed(message: str) -> EngineError:
    return EngineError(message, "a vector for each text", "try again; the log says more")
