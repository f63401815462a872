"""Answers that continue after output tokens which a client already has, as if they had never been interrupted.

Random numbers depend on seed and position alone, and keys and values on the tokens before them. So the next token is
that of the uninterrupted answer. The state of its text, stop strings and grammar is restored here.
"""

from collections.abc import Sequence as Ordered

import numpy as np

from millrace.errors import RequestError
from millrace.runtime.request.request import Request, Sequence
from millrace.runtime.structured_output.grammar import GrammarCompiler

FIELD = "resume_token_ids"  # the name in requests and prompts
_START_OVER = "ask for the whole answer, without resume_token_ids"
_COMPLETE = "use the answer as it is: it is complete"


def resume(request: Request, vocab_size: int, grammars: GrammarCompiler) -> None:
    """Give each choice the tokens that were delivered before. raises RequestError, MachineError"""
    delivered = request.options.delivered
    if not delivered:
        return
    if request.resolved.prompt_top is not None:
        what = "is set together with prompt_logprobs, which belong to the first part of the answer"
        raise _wrong(what, "one of them", "leave prompt_logprobs out")
    if len(delivered) != len(request.choices):
        what, n = f"has token ids for {len(delivered)} choices", len(request.choices)
        raise _wrong(what, f"one list per choice, n = {n}", f"send {n} lists, or set n to {len(delivered)}")
    for tokens in delivered:
        most = request.resolved.max_tokens
        if len(tokens) >= most:
            raise RequestError(
                f"{FIELD} has {len(tokens)} tokens", f"fewer than max_tokens, which is {most} of the whole answer",
                "raise max_tokens, if the answer is not complete", FIELD,
            )  # fmt: skip
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise _wrong(f"has {_at(i, token)}", f"ids from 0 to {vocab_size - 1}", "send ids of this model")
    for seq, tokens in zip(request.choices, delivered, strict=True):  # slower than the checks, so after all of them
        _restore(seq, tokens, grammars)
    request.n_scored = len(request.prompt)  # its log probabilities were delivered before the first of these tokens


def parse_resume_token_ids(value: object) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each choice. value: a list of ids, or one for each choice. raises RequestError"""
    if value is None:
        return ()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    lists = value if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple) else [value]
    for ids in lists:
        if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            what = "is not a list of token ids"
            raise _wrong(what, "a list of integers, or one list per choice", "send the token ids that were delivered")
    return tuple(map(tuple, lists)) if any(lists) else ()


def _restore(seq: Sequence, tokens: Ordered[int], grammars: GrammarCompiler) -> None:
    """Replay the tokens as if they had just been drawn."""
    resolved = seq.request.resolved
    ends = {*resolved.eos_token_ids, *resolved.stop_token_ids}
    n_without_end = min(max(0, resolved.min_tokens - 1), len(tokens))
    for i, token in enumerate(tokens):
        if i >= n_without_end and token in ends:
            place = "ends with" if i == len(tokens) - 1 else "has tokens after"
            raise _wrong(f"{place} {_at(i, token)}, which ends the answer", "tokens of an unfinished answer", _COMPLETE)
        if seq.matcher is not None:
            seq.matcher.accept(token)
            if seq.matcher.error:
                grammars.revive(seq.matcher)  # other answers may have exhausted its lexer
            if matcher_error := seq.matcher.error:
                what = (
                    f"has {_at(i, token)}, which the structured output of this request does not allow: {matcher_error}"
                )
                raise _wrong(what, "tokens of an answer to this request")
    for part, may_stop in ((tokens[:n_without_end], False), (tokens[n_without_end:], True)):
        if (stop := seq.text.push(part, may_stop)[1]) is not None:
            what = f"has the stop string {stop!r}, which ends the answer"
            raise _wrong(what, "tokens of an unfinished answer", _COMPLETE)
    seq.tokens.extend(tokens)


def _at(index: int, token: int) -> str:
    return f"token {token} at index {index}"


def _wrong(what: str, expected: str, fix: str = _START_OVER) -> RequestError:
    return RequestError(f"{FIELD} {what}", expected, fix, FIELD)
