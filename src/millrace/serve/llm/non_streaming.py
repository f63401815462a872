"""Collection of non-streaming answers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from millrace.runtime.request.sampling_params import Delta
from millrace.serve.llm.answer_blocks import Blocks
from millrace.serve.llm.generation_stream import GenerationStream
from millrace.serve.llm.language_model import TextBackend


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer that is collected until it is complete."""

    blocks: Blocks
    last: Delta | None = None

    @property
    def end(self) -> Delta:
        """Return the last delta, which has the finish reason."""
        assert self.last is not None, "a generation is complete when each choice has ended"
        return self.last


async def collect_answer(
    generation: GenerationStream, backend: TextBackend, encode_logprobs: Callable[[Delta], int] = lambda delta: 0
) -> list[CollectedChoice]:
    """Collect all choices; large deltas are parsed in a thread so that the event loop is not blocked.

    encode_logprobs: stores a delta's log probabilities, and returns the bytes added, which count until the answer ends
    raises HttpError with 503 if all collected answers together are too large
    """
    choices = [CollectedChoice(Blocks(generation.new_call_id)) for _ in range(generation.n_choices)]

    def take(deltas: list[Delta]) -> int:
        n_bytes = 0
        for delta in deltas:
            choices[delta.index].blocks.push(generation.parse_delta(delta))
            choices[delta.index].last = delta
            n_bytes += encode_logprobs(delta)
        return n_bytes

    async for deltas in generation:
        generation.reserve_unsent_bytes(
            await backend.encode_off_loop(generation.is_expensive_to_encode(deltas), partial(take, deltas))
        )
    return choices
