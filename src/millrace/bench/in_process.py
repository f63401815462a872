"""The same load on an engine in this process, without HTTP: random tokens of fixed lengths, as in published tables."""

import random
import time
from types import TracebackType

from millrace.bench.answer import Answer, Failure, Question
from millrace.bench.run import MOST_AT_A_TIME
from millrace.errors import MillraceError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine, ServiceOptions

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class EngineClient:
    """Asks a loop of this process; stamps tokens when the event loop has them. `async with EngineClient(loop) as c:`"""

    def __init__(self, loop: EngineLoop, seed: int) -> None:
        self._engine = AsyncEngine(loop, ServiceOptions(max_queued=MOST_AT_A_TIME))
        self._seed, self._n_asked = seed, 0

    async def __aenter__(self) -> "EngineClient":
        self._engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._engine.close()

    async def ask(self, question: Question, answer: Answer | None = None) -> Answer:
        """A question that says how long it is becomes so many random tokens; else its text is encoded, without a
        template. The answer is exactly `max_tokens` long."""
        self._n_asked += 1
        answer = answer or Answer()
        answer.id = f"millrace-bench-{self._n_asked}"
        params = SamplingParams(max_tokens=question.max_tokens or 16, ignore_eos=True, seed=self._n_asked)
        ids = self._tokens(question)
        answer.sent_s, answer.n_prompt = time.perf_counter(), len(ids)
        answer.intended_s = answer.intended_s or answer.sent_s
        try:
            await self._answered(ids, params, answer)
        except MillraceError as error:  # longer than the context, or an engine that has stopped
            answer.fail(Failure.SERVER_ERROR, error.what)
        answer.end_s = time.perf_counter()
        return answer

    async def _answered(self, ids: list[int], params: SamplingParams, answer: Answer) -> None:
        n_told = 0
        async with self._engine.submit([ids], [params], answer.id) as handle:
            async for deltas in handle:
                n_new = sum(len(delta.token_ids) for delta in deltas)
                if n_new:
                    n_told += n_new
                    answer.chunk_s.append(time.perf_counter())
                    answer.chunk_tokens.append(n_told)
                answer.text += "".join(delta.text for delta in deltas)
                for delta in deltas:
                    if delta.finish_reason in _FAILED:
                        answer.fail(Failure.SERVER_ERROR, delta.error or str(delta.finish_reason))
                    elif delta.finish_reason is not None:
                        answer.finish_reason = str(delta.finish_reason.value)
        answer.n_told = n_told

    def _tokens(self, question: Question) -> list[int]:
        if question.n_input is None:
            return self._engine.loop.tokenizer.encode(question.text)
        rng = random.Random(f"{self._seed}/tokens/{self._n_asked}")
        return rng.choices(range(self._engine.limits.vocab_size), k=question.n_input)
