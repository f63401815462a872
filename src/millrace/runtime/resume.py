"""Answers that continue behind output tokens which a client already has, as if they had never been interrupted.

Every random number depends on the seed and the position alone, and keys and values on the tokens before them. So the
next token is that of the uninterrupted answer. Restored here is the state of its text, stop strings and grammar.
"""

from collections.abc import Sequence as Ordered

from millrace.errors import RequestError
from millrace.runtime.grammar import Grammars
from millrace.runtime.request import Request, Sequence

FIELD = "resume_token_ids"  # as requests and prompts name it
_START_OVER = "ask for the whole answer, without resume_token_ids"


def resume(request: Request, vocab_size: int, grammars: Grammars) -> None:
    """Give each choice the tokens that were delivered before. raises RequestError, MachineError"""
    delivered = request.terms.delivered
    if not delivered:
        return
    if request.resolved.prompt_top is not None:
        raise _wrong("is given with prompt_logprobs, which came before the first token", "one of them")
    if len(delivered) != len(request.choices):
        raise _wrong(f"has token ids for {len(delivered)} choices", f"one list per choice, n = {len(request.choices)}")
    for tokens in delivered:
        most = request.resolved.max_tokens
        if len(tokens) >= most:
            raise RequestError(
                f"{FIELD} has {len(tokens)} tokens", f"fewer than max_tokens, which is {most} of the whole answer",
                "raise max_tokens, if the answer is not complete", FIELD,
            )  # fmt: skip
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise _wrong(f"has token {wrong[0]}", f"ids from 0 to {vocab_size - 1}")
    for seq, tokens in zip(request.choices, delivered, strict=True):  # which takes longer than to check them all
        _restore(seq, tokens, grammars)
    request.n_scored = len(request.prompt)  # its log probabilities came before the first of these tokens


def parse_resume_token_ids(given: object) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each choice. given: a list of ids, or one for each choice. raises RequestError"""
    if given is None:
        return ()
    lists = given if isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple) else [given]
    for ids in lists:
        if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _wrong("is not a list of token ids", "a list of integers, or one list per choice")
    return tuple(map(tuple, lists)) if any(lists) else ()


def _restore(seq: Sequence, tokens: Ordered[int], grammars: Grammars) -> None:
    """Replay the tokens as if they had just been drawn."""
    resolved = seq.request.resolved
    ends = {*resolved.eos_token_ids, *resolved.stop_token_ids}
    n_without_end = min(max(0, resolved.min_tokens - 1), len(tokens))
    for i, token in enumerate(tokens):
        if i >= n_without_end and token in ends:
            place = "ends with" if i == len(tokens) - 1 else "has tokens after"
            raise _wrong(f"{place} token {i} ({token}), which ends the answer", "tokens of an unfinished answer")
        if seq.matcher is not None:
            seq.matcher.take(token)
            if seq.matcher.why:
                grammars.revive(seq.matcher)  # other answers may have worn its lexer out
            if why := seq.matcher.why:
                what = f"has token {i}, {token}, which its structured output does not allow: {why}"
                raise _wrong(what, "tokens of an answer to this request")
    for part, may_stop in ((tokens[:n_without_end], False), (tokens[n_without_end:], True)):
        if (stop := seq.text.push(part, may_stop)[1]) is not None:
            raise _wrong(f"has the stop string {stop!r}, which ends the answer", "tokens of an unfinished answer")
    seq.tokens.extend(tokens)


def _wrong(what: str, expected: str) -> RequestError:
    return RequestError(f"{FIELD} {what}", expected, _START_OVER, FIELD)
