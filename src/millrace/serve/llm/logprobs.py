"""Log probabilities in OpenAI's two shapes: chat's, with bytes, and completions', with text offsets.

An answer may have a million of them: `CollectedChatLogprobs` and `CollectedCompletionLogprobs` store them as JSON, in a
sixth of the memory that they take as objects.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer, Tokenizer
from millrace.checkpoint.tool_calls.answer_parser import ParsedDelta
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import Delta, FinishReason, TokenLogprobs
from millrace.serve.llm.response_types import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # OpenAI's number for "impossible"; JSON has no infinity


# Bytes of JSON for each token that is named, with a word of usual length
CHAT_BYTES, COMPLETION_BYTES = 80, 32


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


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is returned before its answer."""

    text: str
    offsets: Sequence[int]  # where each of its tokens begins

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str, ids: Sequence[int], n_special: tuple[int, int]) -> "Echo":
        """Return the echo of a text. n_special: special tokens added before and after it, which are not shown

        Special tokens lie where the text spells them; between two of them, offsets count decoded characters, which a
        normaliser may make more or fewer than the text has.
        """
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        shown, spelled = range(n_special[0], len(ids) - n_special[1]), set(tokenizer.special_ids)
        offsets: list[int] = []
        n_settled = at = spelled_to = 0
        for i, token_id in enumerate(ids):
            if i in shown and token_id in spelled:
                spelling = tokenizer.token_text(token_id)
                if (position := text.find(spelling, spelled_to)) >= 0:
                    offsets[n_settled:] = [min(offset, position) for offset in offsets[n_settled:]]
                    at, spelled_to, n_settled = position, position + len(spelling), len(offsets) + 1
                else:
                    spelled.remove(token_id)  # the unknown token: a text is not searched for it again and again
            offsets.append(at)
            if i in shown:
                at += len(detokenizer.push((token_id,)))
        return cls(text, [min(offset, len(text)) for offset in offsets])

    @classmethod
    def of_ids(cls, tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> "Echo":
        detokenizer, offsets, at = Detokenizer(tokenizer, skip_special_tokens), [], 0
        for token_id in ids:
            offsets.append(at)
            at += len(detokenizer.push((token_id,)))
        return cls(tokenizer.decode(ids, skip_special_tokens), offsets)


class OffsetLogprobs:
    """Converter to completions' shape for one choice. Offsets count from the beginning of the choice's text.

    echo: the echoed prompt, whose tokens come before those of the answer
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] | None, skip_special_tokens: bool, echo: Echo | None
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
        self._echoed = iter(() if echo is None else echo.offsets)
        self._offset = 0 if echo is None else len(echo.text)

    def first(self, token_id: int, with_top: bool) -> CompletionLogprobs:
        """Return the entry of an echoed prompt's first token, which has no log probability."""
        name, offset = self._tokenizer.token_text(token_id), self._advance(token_id)
        return CompletionLogprobs([name], [None], [None] if with_top else None, [offset])

    def take(self, tokens: Sequence[TokenLogprobs], with_top: bool) -> CompletionLogprobs:
        """Convert tokens. with_top: the request asked for alternatives; the chosen token is then among them"""
        offsets = [self._advance(t.token_id) for t in tokens]
        names = [self._tokenizer.token_text(t.token_id) for t in tokens]
        top: list[dict[str, float] | None] | None = None
        if with_top:
            top = [
                {self._tokenizer.token_text(i): _number(p) for i, p in (*t.top, (t.token_id, t.logprob))}
                for t in tokens
            ]
        return CompletionLogprobs(names, [_number(t.logprob) for t in tokens], top, offsets)

    def _advance(self, token_id: int) -> int:
        """Return the offset of a token's text, and advance past it."""
        if (echoed := next(self._echoed, None)) is not None:
            return echoed
        begin = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return begin


class ContentLogprobs:
    """Selector of the tokens that make up an answer's content, if its parser removes marks and holds text back.

    It follows the answer's text token by token; the parser says which spans are content. A token that lies partly in a
    mark and partly in the content counts as content; so does a token that is only a part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
        self._n_text = 0  # characters of the answer so far
        self._n_content = 0  # of them, where all is content
        self._tokens = deque[tuple[int, int, TokenLogprobs]]()  # not settled: where each begins and ends

    def take(self, delta: Delta, parsed: ParsedDelta) -> list[TokenLogprobs]:
        """Return the tokens of `parsed.content`, which was parsed from this delta; once per delta, in order."""
        tokens = delta.logprobs or ()
        if delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str):
            tokens = tokens[:-1]  # the token that ended the answer is not in its text
        for token in tokens:
            begin = self._n_text
            self._n_text += len(self._detokenizer.push((token.token_id,)))
            self._tokens.append((begin, self._n_text, token))
        own: list[TokenLogprobs] = []
        for begin, end in self._spans(parsed):
            self._drop_before(begin)
            while self._tokens and self._tokens[0][0] < end:
                own.append(self._tokens.popleft()[2])
        self._drop_before(parsed.n_settled)
        return own

    def _spans(self, parsed: ParsedDelta) -> Sequence[tuple[int, int]]:
        if parsed.spans is not None:
            return parsed.spans
        begin, self._n_content = self._n_content, self._n_content + len(parsed.content)
        return [(begin, self._n_content)]

    def _drop_before(self, offset: int) -> None:
        """Drop the tokens that end before `offset`; a token that reaches beyond it stays."""
        while self._tokens and self._tokens[0][0] < offset and self._tokens[0][1] <= offset:
            self._tokens.popleft()


class JsonList:
    """A list stored as JSON."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def extend(self, items: Sequence[object]) -> int:
        """Bytes added."""
        before = len(self._json)
        if items:
            self._json += b"," if before > 1 else b""
            self._json += memoryview(msgspec.json.encode(items))[1:-1]
        return len(self._json) - before

    def so_far(self) -> list[Any]:
        """Return the list for a reply; more items may be added afterwards."""
        return cast(list[Any], msgspec.Raw(self._json + b"]"))

    def finish(self) -> list[Any]:
        """Return the list for a reply; nothing can be added afterwards."""
        self._json += b"]"
        return cast(list[Any], msgspec.Raw(self._json))


class CollectedChatLogprobs:
    """The log probabilities of one chat choice, stored as JSON."""

    def __init__(self) -> None:
        self._content = JsonList()

    def add(self, piece: ChatLogprobs) -> int:
        """Bytes added."""
        return self._content.extend(piece.content)

    def finish(self) -> ChatLogprobs:
        return ChatLogprobs(self._content.finish())


class CollectedCompletionLogprobs:
    """The log probabilities of one completion choice, stored as JSON."""

    def __init__(self) -> None:
        self._tokens, self._logprobs, self._top, self._offsets = (JsonList() for _ in range(4))
        self._with_top = False

    def add(self, piece: CompletionLogprobs) -> int:
        """Bytes added."""
        n_bytes = self._tokens.extend(piece.tokens)
        n_bytes += self._logprobs.extend(piece.token_logprobs)
        n_bytes += self._offsets.extend(piece.text_offset)
        if piece.top_logprobs is not None:
            self._with_top = True
            n_bytes += self._top.extend(piece.top_logprobs)
        return n_bytes

    def finish(self) -> CompletionLogprobs:
        top = self._top.finish() if self._with_top else None
        return CompletionLogprobs(self._tokens.finish(), self._logprobs.finish(), top, self._offsets.finish())


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)


def check_reply_bytes(n_tokens: int, n_top: int, bytes_per_logprob: int, max_bytes: int, n: int) -> None:
    """Refuse an answer whose log probabilities would be too large to send in one piece. raises RequestError

    Its text is small in comparison and not counted. n: as requested; not all protocols have it
    """
    n_bytes = n_tokens * (1 + n_top) * bytes_per_logprob
    if n_bytes > max_bytes:
        fields = "n, max_tokens" if n > 1 else "max_tokens"
        raise RequestError(
            f"an answer of {n_tokens} tokens, with {1 + n_top} log probabilities for each, "
            f"is some {n_bytes // 2**20} MiB",
            f"at most {max_bytes // 2**20} MiB in one piece",
            f"lower {fields} or the number of log probabilities, or have a chat or completion streamed",
            param="logprobs",
        )
