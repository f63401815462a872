"""Log probabilities in OpenAI's two shapes: chat's, with bytes, and completions', with text offsets."""

from collections.abc import Sequence

from millrace.checkpoint.tokenizer import Detokenizer, Tokenizer
from millrace.runtime.params import TokenLogprobs
from millrace.serve.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # OpenAI's number for "impossible"; JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token=tokenizer.token_text(t.token_id),
                logprob=_number(t.logprob),
                bytes=list(tokenizer.token_bytes(t.token_id)),
                top_logprobs=[
                    TopLogprob(tokenizer.token_text(i), _number(p), list(tokenizer.token_bytes(i))) for i, p in t.top
                ],
            )
            for t in tokens
        ]
    )


class OffsetLogprobs:
    """Completions' shape for one choice, piece by piece. Offsets count from the beginning of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
        self._offset = 0

    def take(self, tokens: Sequence[TokenLogprobs], with_top: bool) -> CompletionLogprobs:
        """`with_top`: the request asked for alternatives; then the chosen token is among them."""
        offsets = []
        for t in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((t.token_id,)))
        names = [self._tokenizer.token_text(t.token_id) for t in tokens]
        top = None
        if with_top:
            top = [
                {self._tokenizer.token_text(i): _number(p) for i, p in (*t.top, (t.token_id, t.logprob))}
                for t in tokens
            ]
        return CompletionLogprobs(names, [_number(t.logprob) for t in tokens], top, offsets)


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], None, [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.text_offset += part.text_offset
        if part.top_logprobs is not None:
            whole.top_logprobs = [] if whole.top_logprobs is None else whole.top_logprobs
            whole.top_logprobs += part.top_logprobs
    return whole


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)
