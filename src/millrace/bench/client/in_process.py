"""Client for an engine in this process, without HTTP: random tokens of fixed lengths, as in published benchmarks."""

import time
import zlib
from types import TracebackType

import numpy as np

from millrace.bench.client.request_record import BenchRecord, BenchRequest, Failure, request_ids
from millrace.bench.run.run import MAX_AT_A_TIME
from millrace.errors import MillraceError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine, ServiceOptions

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class EngineClient:
    """A client of an engine loop in this process; timestamps are taken in the event loop."""

    def __init__(self, loop: EngineLoop, seed: int) -> None:
        self._engine = AsyncEngine(loop, ServiceOptions(max_queued=MAX_AT_A_TIME))
        self._random_tokens, self._n_requests, self._ids = (
            RandomTokens(seed, self._engine.limits.vocab_size),
            0,
            request_ids(),
        )

    async def __aenter__(self) -> "EngineClient":
        self._engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._engine.close()

    async def ask(self, question: BenchRequest, answer: BenchRecord | None = None) -> BenchRecord:
        """Run one request. A request with a length becomes random tokens, with equal prefixes for equal text prefixes;
        otherwise its text is encoded without a template. The answer is exactly `max_tokens` long."""
        self._n_requests += 1
        answer = answer or BenchRecord()
        answer.id = next(self._ids)
        params = SamplingParams(max_tokens=question.max_tokens or 16, ignore_eos=True, seed=self._n_requests)
        ids = self._tokens(question)
        answer.sent_s, answer.n_prompt = time.perf_counter(), len(ids)
        answer.intended_s = answer.intended_s or answer.sent_s
        try:
            await self._collect(ids, params, answer)
        except MillraceError as error:  # longer than the context, or an engine that has stopped
            answer.fail(Failure.SERVER_ERROR, error.what)
        answer.end_s = time.perf_counter()
        return answer

    async def _collect(self, ids: list[int], params: SamplingParams, answer: BenchRecord) -> None:
        n_reported = 0
        async with self._engine.submit([ids], [params], answer.id) as handle:
            async for deltas in handle:
                n_new = sum(len(delta.token_ids) for delta in deltas)
                if n_new:
                    n_reported += n_new
                    answer.chunk_s.append(time.perf_counter())
                    answer.chunk_tokens.append(n_reported)
                answer.text += "".join(delta.text for delta in deltas)
                for delta in deltas:
                    if delta.finish_reason in _FAILED:
                        answer.fail(Failure.SERVER_ERROR, delta.error or str(delta.finish_reason))
                    elif delta.finish_reason is not None:
                        answer.finish_reason = str(delta.finish_reason.value)
        answer.n_reported = n_reported

    def _tokens(self, question: BenchRequest) -> list[int]:
        if question.n_input is None:
            return self._engine.loop.tokenizer.encode(question.text)
        return self._random_tokens.for_text(question.text, question.n_input)


class RandomTokens:
    """Random tokens for texts whose words stand for tokens: the token depends on the word and its position. Texts with
    a common prefix thus have a common token prefix, which an engine may cache."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng, self._vocab_size, self._places = np.random.default_rng(seed), vocab_size, list[int]()

    def for_text(self, text: str, n: int) -> list[int]:
        """Return exactly `n` tokens for a text."""
        while len(self._places) < n:
            self._places += self._rng.integers(0, 1 << 32, 4096).tolist()
        words = text.split()[:n]
        words += [""] * (n - len(words))
        return [zlib.crc32(word.encode(), at) % self._vocab_size for word, at in zip(words, self._places, strict=False)]
