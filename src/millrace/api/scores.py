"""Scores of a cross-encoder in this process, with results as in vLLM."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.api.embeddings import result_of
from millrace.api.offline_generate import Progress
from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import RequestError
from millrace.runtime.encoder_loop import EncoderLoop
from millrace.runtime.text_pairs import check_counts, join_texts

NAMES = ("data_1", "data_2")


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The result of a pair of texts; `outputs.score` is its score, `prompt_token_ids` are those of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Scorer:
    """`score()` of a model. The loop runs in its own thread."""

    loop: EncoderLoop
    tokenizer: Tokenizer
    template: PairTemplate

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], truncate_prompt_tokens: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """Return the score of each text of `data_2` with data_1, one text, or as many as in `data_2`; in order.

        raises RequestError, before anything runs, if a text is invalid; EngineError if a step failed; BusyError if the
        loop is closed
        """
        first, second = self._ids(NAMES[0], data_1), self._ids(NAMES[1], data_2)
        check_counts(len(first), len(second), NAMES)
        sequences, n_first = join_texts(
            self.template, first, second, self.loop.limits, truncate_prompt_tokens, NAMES[1]
        )
        scores = result_of(self.loop.submit(sequences, n_first), progress)
        return [
            ScoringRequestOutput(uuid.uuid4().hex, ScoringOutput(float(score[0])), ids.tolist())
            for score, ids in zip(scores, sequences, strict=True)
        ]

    def _ids(self, name: str, data: object) -> list[list[int]]:
        """Return the token ids of each text, without special tokens. raises RequestError"""
        texts = [data] if isinstance(data, str) else data
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name} is {data!r:.60}", "a text or a list of texts", "send text", name)
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
