"""The text side of one choice: drawn tokens go in, deltas with text, log probabilities and the finish come out."""

from collections.abc import Sequence as Ordered
from typing import Protocol

from millrace.runtime.params import Delta, FinishReason, TokenLogprobs
from millrace.runtime.sequence import Sequence
from millrace.runtime.stops import Finish, StopStrings, StopTables, finish_by_length, finish_by_token


class TextStream(Protocol):
    """What an answer needs of `checkpoint.tokenizer.Detokenizer`."""

    def push(self, ids: Ordered[int]) -> str:
        """The complete characters that these tokens add."""
        ...

    def flush(self) -> str:
        """What an unfinished character leaves."""
        ...


class Answer:
    """One choice of one request as its reader sees it."""

    __slots__ = ("_detokenizer", "_stops", "sequence")

    def __init__(self, sequence: Sequence, detokenizer: TextStream, stops: StopTables) -> None:
        """stops: of the request's `stop`, one for all of its choices"""
        self.sequence = sequence
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, sequence.request.params.include_stop_str_in_output)

    def take(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Append a drawn token to the sequence and say what that adds, and whether it ends the answer.

        A token that ends the answer counts as its last token; its text is left out, save for a stop token with
        `include_stop_str_in_output`.
        """
        seq = self.sequence
        seq.tokens.append(token)
        n_output, resolved = seq.n_output, seq.request.resolved
        finish = finish_by_token(token, n_output, resolved)
        shown = finish is None or (finish.stop is not None and seq.request.params.include_stop_str_in_output)
        text, stop = "", None
        if shown:
            text, stop = self._stops.push(self._detokenizer.push((token,)), n_output >= resolved.min_tokens)
        if stop is not None:
            finish = finish or Finish(FinishReason.STOP, stop)
        else:
            finish = finish or finish_by_length(n_output, resolved)
            if finish is not None:
                text += self._rest()
        return Delta(
            index=seq.index,
            text=text,
            token_ids=(token,),
            logprobs=None if logprobs is None else (logprobs,),
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> Delta:
        """The last delta of an answer that ends without a token: aborted or failed."""
        return Delta(index=self.sequence.index, text=self._rest(), token_ids=(), finish_reason=reason, error=error)

    def _rest(self) -> str:
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=False)
        assert stop is None
        return text + self._stops.flush()
