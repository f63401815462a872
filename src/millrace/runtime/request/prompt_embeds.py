"""Prompts given as embedding rows, which enter the first layer in place of token embeddings.

A row has a negative number in place of a token id: row e is the token -1 - e. The rows' content is part of the keys of
all pages of the request, so the prefix cache never confuses two such prompts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import ExecutorLimits, IntArray
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import SamplingParams, check_context, check_prompt

FIELD = "prompt_embeds"  # the name in requests and prompts
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedPrompt:
    """A checked copy of a prompt of embedding rows (N, width). digest: of the rows, used in prefix-cache keys"""

    rows: Rows
    digest: bytes

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def from_rows(cls, rows: Rows, limits: ExecutorLimits) -> "EmbeddedPrompt":
        """Check and copy the rows of a prompt. raises RequestError if this engine does not take them"""
        check_shape(rows.shape[0], rows.shape[1], limits)
        if not np.isfinite(rows).all():
            raise _wrong("has numbers that are not finite", "finite numbers", "correct them")
        own = rows.copy()
        return cls(own, hashlib.blake2b(own.tobytes(), digest_size=32, person=b"millrace.embeds").digest())


Prompt = Sequence[int] | IntArray | Rows | EmbeddedPrompt


def parse_prompt(
    prompt: Prompt, params: SamplingParams, limits: ExecutorLimits
) -> tuple[IntArray, EmbeddedPrompt | None]:
    """Return the tokens of a prompt (N,), and its embedding rows if it is given as rows. raises RequestError"""
    value: Any = prompt
    if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.float32:
        value = EmbeddedPrompt.from_rows(value, limits)
    if not isinstance(value, EmbeddedPrompt):
        return check_prompt(value, limits), None
    _check_params(params)
    numbers = -1 - np.arange(len(value), dtype=np.int32)
    numbers.setflags(write=False)
    return numbers, value


def _check_params(params: SamplingParams) -> None:
    """Check for parameters that need token ids. raises RequestError"""
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs is set for a prompt of {FIELD}", "prompt_logprobs with a text or token ids",
            "leave prompt_logprobs out", "prompt_logprobs",
        )  # fmt: skip


def check_shape(n: int, width: int, limits: ExecutorLimits) -> None:
    """Check the shape (n, width) of embedding rows. raises RequestError if this engine does not take it"""
    if not limits.embedding_width:
        raise _wrong("is set, and this engine takes token ids only", "a prompt of text or token ids", "send one")
    if width != limits.embedding_width:
        what, fix = f"has rows of {width} numbers", "take the rows from this model's embedding table"
        raise _wrong(what, f"rows of {limits.embedding_width}, the model's hidden size", fix)
    check_context(n, None, limits.context_tokens, FIELD)


def to_rows(matrix: Any, limits: ExecutorLimits) -> Rows:
    """Return an array, a tensor, or lists of numbers as rows (N, width) of float32.

    The shape is checked against `limits` before the conversion. raises RequestError
    """
    shape: Sequence[int] = getattr(matrix, "shape", ())
    if len(shape) == 2 and shape[0]:
        check_shape(int(shape[0]), int(shape[1]), limits)
    if getattr(getattr(matrix, "dtype", None), "kind", "f") == "c":
        raise _wrong("has complex numbers", "real numbers", "send these")
    if hasattr(matrix, "detach"):  # also one of bfloat16
        matrix = matrix.detach().float().cpu().numpy()
    try:
        with np.errstate(over="ignore"):  # values that become infinite are refused later
            rows = np.ascontiguousarray(matrix, np.float32)
    except (TypeError, ValueError):
        rows = np.empty(0, np.float32)
    if rows.ndim != 2 or not rows.size:
        raise _wrong("is not a matrix of numbers", "a (tokens, hidden size) matrix with at least one row", "send one")
    return rows


def _wrong(what: str, expected: str, fix: str) -> RequestError:
    return RequestError(f"{FIELD} {what}", expected, fix, FIELD)
