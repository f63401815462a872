"""Embeddings in this process, with results as in vLLM."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from millrace.api.offline_generate import Progress, Prompt, prompt_tokens
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.runtime.encoder_loop import EmbeddingJob, EncoderLoop, Vectors, check_ids, truncate_ids, truncation

PROGRESS_S = 0.2


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The result of a prompt; `outputs.embedding` is its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


def result_of(job: EmbeddingJob, progress: Callable[[Progress], None] | None) -> Vectors:
    """Wait for the vectors of a job, and cancel it if the wait is interrupted. raises EngineError, BusyError"""
    n_texts = len(job.texts)
    try:
        while progress is not None and not job.future.done():
            wait((job.future,), timeout=PROGRESS_S)
            progress(Progress(n_texts - job.n_missing, n_texts, job.n_tokens_done))
        return job.future.result()
    finally:
        job.future.cancel()  # Ctrl-C: leave nothing running


def embed(
    loop: EncoderLoop, tokenizer: Tokenizer, prompts: Sequence[Prompt], truncate_prompt_tokens: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[EmbeddingRequestOutput]:  # fmt: skip
    """Return a vector per prompt, in order; the loop runs in its own thread.

    raises RequestError, before anything runs, if a prompt is invalid; EngineError if a step failed; BusyError if the
    loop is closed
    """
    most = truncation(truncate_prompt_tokens, loop.limits.max_context)
    texts = []
    for i, prompt in enumerate(prompts):
        text, ids = prompt_tokens(tokenizer, prompt)
        if most is not None:
            ids = truncate_ids(ids, most, (0, 0) if text is None else tokenizer.special_around)
        texts.append(check_ids(ids, loop.limits, f"text {i}"))
    vectors = result_of(loop.submit(texts), progress)
    return [
        EmbeddingRequestOutput(uuid.uuid4().hex, EmbeddingOutput(vector.tolist()), ids.tolist())
        for vector, ids in zip(vectors, texts, strict=True)
    ]
