"""Embeddings in this process, with the results that users of vLLM know; and what any text must be to get one."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.tokenizer import Tokenizer, VocabularyTokenizer
from millrace.checkpoint.tokenizer_files import open_tokenizer
from millrace.engine.engine import Engine
from millrace.engine.native import NativeNetwork
from millrace.engine.texts import Ids
from millrace.errors import ConfigError, MachineError, RequestError
from millrace.machine.cpu import memory, usable_cores
from millrace.runtime.embedding import EncoderLimits, EncoderLoop
from millrace.runtime.generate import Progress, Prompt, prompt_tokens
from millrace.runtime.open import RunSettings
from millrace.runtime.plan import RESERVE

PROGRESS_S = 0.2
ALL = -1  # truncate_prompt_tokens: to as many as the model takes


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """`outputs.embedding` is the vector of the prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """An encoder that runs: close it when done, after the loop has stopped."""

    name: str
    engine: Engine
    network: NativeNetwork
    tokenizer: VocabularyTokenizer
    limits: EncoderLimits
    chat_template: None = None

    def loop(self) -> EncoderLoop:
        return EncoderLoop(self.network, self.limits)

    def close(self) -> None:
        self.network.close()
        self.engine.close()


def open_encoder(name: str, engine: Engine, run: RunSettings) -> OpenedEncoder:
    """Plans the memory, then loads the weights.

    raises MachineError before anything large is touched, ConfigError for --kv-memory, which an encoder has no use for
    """
    if run.kv_memory is not None:
        raise ConfigError("--kv-memory is given for an encoder", "nothing: it keeps no keys and values", "leave it out")
    m = engine.manifest
    needed, free = m.cpu.weights_bytes + m.cpu.activation_bytes + RESERVE, memory().available_bytes
    if needed > free:
        raise MachineError(
            f"this engine needs {needed >> 20} MiB: weights {m.cpu.weights_bytes >> 20} MiB, activations "
            f"{m.cpu.activation_bytes >> 20} MiB; {free >> 20} MiB are available",
            "all of it before anything is loaded", "build with --precision bf16, or free memory",
        )  # fmt: skip
    tokenizer, limits = open_tokenizer(engine.folder), EncoderLimits.of(engine)
    network = engine.network(threads=run.threads or usable_cores(), isa=run.isa)
    return OpenedEncoder(name, engine, network, tokenizer, limits)


def embed(
    loop: EncoderLoop, tokenizer: Tokenizer, prompts: Sequence[Prompt], truncate_prompt_tokens: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[EmbeddingRequestOutput]:  # fmt: skip
    """A vector for each prompt, in their order; the loop runs in its thread.

    raises RequestError, before anything runs, where one of the prompts is wrong; EngineError where a step failed,
    BusyError where the loop was closed
    """
    most = truncation(truncate_prompt_tokens, loop.limits.max_context)
    texts = []
    for i, prompt in enumerate(prompts):
        text, ids = prompt_tokens(tokenizer, prompt)
        if most is not None:
            ids = truncated(ids, most, (0, 0) if text is None else tokenizer.special_around)
        texts.append(checked_ids(ids, loop.limits, f"text {i}"))
    job = loop.submit(texts)
    try:
        while progress is not None and not job.future.done():
            wait((job.future,), timeout=PROGRESS_S)
            progress(Progress(len(texts) - job.n_missing, len(texts), job.n_tokens_done))
        vectors = job.future.result()
    finally:
        job.future.cancel()  # Ctrl-C: leave nothing running behind
    return [
        EmbeddingRequestOutput(uuid.uuid4().hex, EmbeddingOutput(vector.tolist()), ids.tolist())
        for vector, ids in zip(vectors, texts, strict=True)
    ]


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


def truncation(asked: int | None, max_context: int) -> int | None:
    """How many tokens of a text are read at most; None: all, and too many are an error. raises RequestError"""
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or not (asked == ALL or 1 <= asked <= max_context):
        raise RequestError(
            f"truncate_prompt_tokens is {asked!r:.60}", f"1 to {max_context}, or -1 for {max_context}", "correct it",
            param="truncate_prompt_tokens",
        )  # fmt: skip
    return max_context if asked == ALL else asked
