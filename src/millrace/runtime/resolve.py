"""From what was asked to what will be done: request, then the model's generation_config, then the default.

`SamplingParams` is what a caller said; `Resolved` has an answer for every question, checked against this engine.
"""

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.generation import GenerationDefaults
from millrace.engine.executor import SAMPLING, ExecutorLimits, IntArray
from millrace.errors import RequestError
from millrace.runtime.params import COMPLETION_TOKENS, SEED_BITS, SamplingParams

SEED_MASK = 2**64 - 1

_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Every parameter of one request with its final value."""

    n: int
    max_tokens: int
    min_tokens: int
    seed: int  # as asked, or the one that was drawn
    n_top: int | None  # alternatives per token; None: no log probabilities
    prompt_top: int | None  # the same for the tokens of the prompt
    eos_token_ids: frozenset[int]  # empty with ignore_eos
    stop_token_ids: frozenset[int]
    include_stop: bool  # the text of what ended the answer is part of it
    bias_ids: IntArray  # (B,)
    bias_values: NDArray[np.float32]  # (B,)
    needs_history: bool  # a penalty looks at the tokens so far
    row: NDArray[np.void]  # (1,) of SAMPLING: what the executor is told of every draw


def context_tokens(limits: ExecutorLimits) -> int:
    """The longest prompt + output of one sequence: the planned context, or all KV pages where those hold less."""
    return min(limits.max_context, limits.n_pages * limits.page_tokens)


def check_prompt(token_ids: Sequence[int] | IntArray, limits: ExecutorLimits) -> IntArray:
    """The prompt as an array of its own (N,); RequestError when empty, not token ids, or without room for an answer."""
    context, where = context_tokens(limits), "prompt"
    if len(token_ids) == 0:
        raise no_tokens(where)
    if len(token_ids) >= context:  # before the conversion: a prompt of 100 MB ends here
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens",
            f"at most {context - 1}, because this engine's context is {context} tokens and an answer needs at least 1",
            "shorten the prompt, or build the engine with a larger --max-context where its model allows that",
            param=where,
        )
    try:
        wide = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        wide = np.empty((0, 0))
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise RequestError("the prompt is not a list of token ids", "integers", "send token ids or text", param=where)
    outside = np.flatnonzero((wide < 0) | (wide >= limits.vocab_size))
    if outside.size:
        at = int(outside[0])
        raise RequestError(
            f"prompt token {at} is {int(wide[at])}",
            f"a token id from 0 to {limits.vocab_size - 1}",
            "tokenise the text with this model's own tokenizer",
            param=where,
        )
    prompt = wide.astype(np.int32)
    prompt.setflags(write=False)
    return prompt


def no_tokens(param: str) -> RequestError:
    """Of a prompt that is empty, where the tokenizer puts nothing in front of a text either."""
    return RequestError("the prompt has no tokens", "at least 1", "send some text", param)


def with_length(params: SamplingParams, n_prompt: int, context: int) -> SamplingParams:
    """`params` of a text to be continued: who does not say how far gets a few tokens, and not minutes of them.

    Fewer where the context ends before, more where `min_tokens` asks for them.
    """
    if params.max_tokens is not None:
        return params
    unsaid = min(max(COMPLETION_TOKENS, params.min_tokens), context - n_prompt)
    return replace(params, max_tokens=max(unsaid, 1))  # a prompt that leaves no room is refused as such


def resolve(params: SamplingParams, defaults: GenerationDefaults, limits: ExecutorLimits, n_prompt: int) -> Resolved:
    """Answer every open question of `params` for a prompt of `n_prompt` tokens.

    raises RequestError where the lengths do not fit the context, or an id is outside the vocabulary.
    """
    max_tokens = _max_tokens(params, context_tokens(limits), n_prompt)
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}", f"at most max_tokens, {max_tokens}", "lower min_tokens", "min_tokens"
        )
    bias = sorted(params.logit_bias.items())
    bias_ids = _vocabulary_ids("logit_bias", [i for i, _ in bias], limits.vocab_size)
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
    asked = params.logprobs, params.prompt_logprobs
    n_top, prompt_top = (None if n is None else min(n, limits.vocab_size) for n in asked)
    if prompt_top is not None and limits.max_rows <= limits.max_sequences:
        raise RequestError(
            "prompt_logprobs is set, but this engine has no room for the logits of a prompt",
            f"an engine with more than {limits.max_sequences} rows of logits", "build it again", "prompt_logprobs",
        )  # fmt: skip
    row = _row(params, defaults, limits.vocab_size)
    row["seed"], row["n_top"], row["bias_count"] = seed & SEED_MASK, -1 if n_top is None else n_top, len(bias_ids)
    penalties = (row["presence_penalty"][0], row["frequency_penalty"][0], row["repetition_penalty"][0] - 1)
    return Resolved(
        n=params.n,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        seed=seed,
        n_top=n_top,
        prompt_top=prompt_top,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset(defaults.eos_token_ids),
        stop_token_ids=frozenset(_vocabulary_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)),
        include_stop=params.include_stop_str_in_output,
        bias_ids=np.array(bias_ids, dtype=np.int32),
        bias_values=np.array([v for _, v in bias], dtype=np.float32),
        needs_history=any(penalties),
        row=row,
    )


def _row(params: SamplingParams, defaults: GenerationDefaults, vocab_size: int) -> NDArray[np.void]:
    """(1,) of SAMPLING: how to draw."""
    row = np.zeros(1, dtype=SAMPLING)
    top_k = _first(params.top_k, defaults.top_k, 0)
    row["target"] = -1
    row["top_k"] = top_k if 0 < top_k < vocab_size else 0  # -1 and "all of them" are off
    row["temperature"] = _first(params.temperature, defaults.temperature, 1.0)
    row["top_p"] = _first(params.top_p, defaults.top_p, 1.0)
    row["min_p"] = _first(params.min_p, defaults.min_p, 0.0)
    row["presence_penalty"] = params.presence_penalty
    row["frequency_penalty"] = params.frequency_penalty
    row["repetition_penalty"] = _first(params.repetition_penalty, defaults.repetition_penalty, 1.0)
    return row


def _max_tokens(params: SamplingParams, context: int, n_prompt: int) -> int:
    rest = context - n_prompt
    if params.max_tokens is None:
        return rest
    asked = n_prompt + params.max_tokens
    if asked > context:
        raise RequestError(
            f"prompt and max_tokens together are {n_prompt} + {params.max_tokens} = {asked} tokens",
            f"at most {context}, this engine's context",
            f"ask for max_tokens of at most {rest}, or shorten the prompt",
            param="max_tokens",
        )
    return params.max_tokens


def _vocabulary_ids(name: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    try:
        known = [operator.index(i) for i in ids]
    except TypeError:
        known = [-1]
    wrong = [i for i in known if not 0 <= i < vocab_size]
    if wrong:
        raise RequestError(
            f"{name} holds {list(ids)[:8]!r}", f"token ids from 0 to {vocab_size - 1}", f"correct {name}", param=name
        )
    return known


def _first(asked: _T | None, model: _T | None, default: _T) -> _T:
    if asked is not None:
        return asked
    return default if model is None else model
