"""When an answer ends: end-of-text, stop tokens, stop strings, max_tokens.

Stop strings are looked for in the detokenised text, character by character, so the answer does not depend on how the
text is cut into tokens: the first stop string to be complete ends it, of two that end together the longer one. Text
that may be the beginning of a stop string is held back until that is decided.

`min_tokens`: until that many tokens are out, end-of-text, stop tokens and complete stop strings are passed over (they
stay in the answer); the logits are not touched, so what is drawn is what would have been drawn without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.runtime.params import FinishReason
from millrace.runtime.resolve import Resolved


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop: int | str | None = None  # the stop token or string; None for end-of-text and lengths


def finish_by_token(token: int, n_output: int, resolved: Resolved) -> Finish | None:
    """Whether `token`, the `n_output`-th of the answer, is one that ends it."""
    if n_output < resolved.min_tokens:
        return None
    if token in resolved.eos_token_ids:
        return Finish(FinishReason.STOP)
    if token in resolved.stop_token_ids:
        return Finish(FinishReason.STOP, token)
    return None


def finish_by_length(n_output: int, resolved: Resolved) -> Finish | None:
    """`max_tokens` is never beyond the context, so this is the end of the context, too."""
    return Finish(FinishReason.LENGTH) if n_output >= resolved.max_tokens else None


class StopTables:
    """What the search for some stop strings needs beforehand: made once a request, shared by its choices."""

    __slots__ = ("borders", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted(set(stops), key=len, reverse=True)  # the longest first wins a tie
        self.borders = [_borders(stop) for stop in self.stops]


class StopStrings:
    """Finds the first of some strings in a stream of text (Knuth, Morris and Pratt, one automaton each)."""

    __slots__ = ("_borders", "_held", "_include", "_matched", "_stops")

    def __init__(self, tables: StopTables, include_in_output: bool) -> None:
        self._stops, self._borders = tables.stops, tables.borders
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that is certain to be in the answer, the stop string found or None).

        With `may_stop` False a complete stop string is passed over. After one was found, push no more.
        """
        if not self._stops:
            return text, None
        seen = self._held + text
        for at in range(len(self._held), len(seen)):
            stop = self._advance(seen[at])
            if stop is not None and may_stop:
                self._held = ""
                return seen[: at + 1 if self._include else at + 1 - len(stop)], stop
        n_held = max(self._matched)
        self._held = seen[len(seen) - n_held :]
        return seen[: len(seen) - n_held], None

    def flush(self) -> str:
        """The text still held back: no more is coming."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for i, stop in enumerate(self._stops):
            n, borders = self._matched[i], self._borders[i]
            while n and stop[n] != char:
                n = borders[n - 1]
            n += stop[n] == char
            if n == len(stop):
                found = found or stop
                n = borders[n - 1]
            self._matched[i] = n
        return found


class TextStream(Protocol):
    """What an answer needs of `checkpoint.tokenizer.Detokenizer`."""

    def push(self, ids: Sequence[int]) -> str:
        """The complete characters that these tokens add."""
        ...

    def flush(self) -> str:
        """What an unfinished character leaves."""
        ...


class AnswerText:
    """The text of one answer, token by token, up to a stop string."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: TextStream, tables: StopTables, include_stop: bool) -> None:
        """tables: of the request's `stop`, one for all of its choices"""
        self._detokenizer, self._stops = detokenizer, StopStrings(tables, include_stop)

    def push(self, token: int, may_stop: bool) -> tuple[str, str | None]:
        """As `StopStrings.push`, of what this token adds."""
        return self._stops.push(self._detokenizer.push((token,)), may_stop)

    def flush(self) -> str:
        """What is still held back: no token is coming."""
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=False)
        assert stop is None
        return text + self._stops.flush()


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix again."""
    borders, n = [0], 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = borders[n - 1]
        n += stop[n] == char
        borders.append(n)
    return borders
