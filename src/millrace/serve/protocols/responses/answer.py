"""A response in progress: its reply so far, and its events."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from millrace.checkpoint.tool_calls.answer_parser import ParsedDelta
from millrace.runtime.request.sampling_params import Delta
from millrace.serve.http.errors import GenerationFailedError, HttpError, HttpProblem
from millrace.serve.llm.answer_blocks import AnswerBlock, BlockChange, BlockEvent, BlockKind, Blocks
from millrace.serve.llm.event_stream import encode_named_event
from millrace.serve.llm.generation_stream import GenerationStream
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.logprobs import ContentLogprobs, JsonList, chat_logprobs
from millrace.serve.llm.request_types import CalledFunction, Message, ToolCall
from millrace.serve.llm.response_types import TokenLogprob
from millrace.serve.protocols.responses.protocol import (
    CallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
)

TextLogprobs = Sequence[TokenLogprob]
N_CLOSING = 4  # events at the end of a text that have all of its log probabilities


@dataclass(frozen=True, slots=True)
class _DecodedDelta:
    """A delta, its parsed parts, and the log probabilities of its text."""

    delta: Delta
    parsed: ParsedDelta
    named: TextLogprobs


class ActiveResponse:
    """One response in progress. reply: its state so far"""

    def __init__(self, backend: TextBackend, generation: GenerationStream, reply: ResponseReply) -> None:
        self.generation, self.reply, self._backend = generation, reply, backend
        self._blocks = Blocks(generation.new_call_id)
        self._n_events, self.is_cancelled = 0, False
        self._item_ids: list[str] = []
        self._logprobs: dict[int, JsonList] = {}  # log probabilities of each block of text, by its index
        self.on_finish: Callable[[], None] | None = None  # before the last event, which may depend on it
        self._of_content: ContentLogprobs | None = None
        if generation.params.logprobs is not None:
            (request,), skips = generation.handle.requests, generation.params.skip_special_tokens
            self._of_content = ContentLogprobs(backend.model.tokenizer, request.prompt.tolist(), skips)

    async def take(self, deltas: list[Delta]) -> None:
        """Add deltas to the response. raises GenerationFailedError"""
        decoded = await self._read(deltas)
        if self.is_cancelled:  # what was said by then is settled
            return
        for read in decoded:
            for _ in self._add(read):
                pass
            if read.delta.finish_reason is not None:
                self._finish(read.delta)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield blocks of events. raises GenerationFailedError"""
        head = self._event("response.created", response=self.reply) + self._event(
            "response.in_progress", response=self.reply
        )
        if self.reply.background:  # a client that is disconnected early needs its id
            yield head
            head = b""
        async for deltas in self.generation:
            decoded = await self._read(deltas)
            if self.is_cancelled:
                return
            happened = [one for read in decoded for one in self._add(read, N_CLOSING)]
            last = decoded[-1].delta
            if last.finish_reason is not None:  # complete before anything is awaited: a cancellation comes too late
                happened += [(closing, ()) for closing in self._blocks.close()]
                self._finish(last)
            for block in self._encode_step(head, happened, last.finish_reason is not None):
                yield block
            head = b""

    def fail(self, problem: HttpProblem) -> None:
        self.reply.status, self.reply.error = "failed", ResponseError(problem.code or "server_error", problem.message)

    def cancel(self) -> None:
        """Cancel the response at a client's request. A complete response stays complete."""
        self.is_cancelled = True
        self.generation.handle.cancel()

    def end(self) -> None:
        """End the response; if it is not complete, its output so far remains."""
        if self.reply.status == "in_progress":
            self.reply.status = "cancelled"
        if self.reply.usage is None:
            self._settle()

    def last_event(self) -> bytes:
        """Return the last event of a stream that does not end regularly."""
        kind = "failed" if self.reply.status == "failed" else "incomplete"
        return self._event(f"response.{kind}", response=self.reply)

    def reader_too_slow_event(self) -> bytes:
        """Return the event for a client that reads a background response too slowly."""
        message = f"too much was left unread; the answer goes on: ask for /v1/responses/{self.reply.id}"
        return self._event("error", code="reader_too_slow", message=message)

    @property
    def has_output(self) -> bool:
        """Return whether there is output, so that a conversation can continue from it."""
        return bool(self._blocks.all) or self.reply.status in ("completed", "incomplete")

    @property
    def message(self) -> Message:
        """Return the answer as a message of the next request's conversation."""
        calls = [ToolCall(CalledFunction(block.name, block.text), block.call_id) for block in self._blocks.calls()]
        text, thoughts = self._blocks.text(BlockKind.TEXT), self._blocks.text(BlockKind.REASONING)
        content = text if text or not calls else None
        return Message("assistant", content, tool_calls=calls or None, reasoning_content=thoughts or None)

    async def _read(self, deltas: list[Delta]) -> list[_DecodedDelta]:
        return [
            _DecodedDelta(delta, parsed := self.generation.parse_delta(delta), await self._text_logprobs(delta, parsed))
            for delta in deltas
        ]

    async def _text_logprobs(self, delta: Delta, parsed: ParsedDelta) -> TextLogprobs:
        """Return the log probabilities of the text that a delta adds; computed in a thread if they are many."""
        tokens = self._of_content.take(delta, parsed) if self._of_content is not None else ()
        if not tokens:
            return ()
        tokenizer, is_much = self._backend.model.tokenizer, self.generation.is_expensive_to_encode([delta])
        return await self._backend.encode_off_loop(is_much, lambda: chat_logprobs(tokenizer, tokens).content)

    def _add(self, read: _DecodedDelta, n_copies: int = 1) -> Iterator[tuple[BlockChange, TextLogprobs]]:
        """Yield the changes of blocks, with the log probabilities of added text. raises GenerationFailedError

        n_copies: of all log probabilities, that will be written
        """
        for turn, block, text in self._blocks.add(read.parsed):
            named = read.named if turn is BlockEvent.ADDED and block.kind is BlockKind.TEXT else ()
            if named:
                n_bytes = self._logprobs.setdefault(block.index, JsonList()).extend(named)
                try:
                    self.generation.reserve_unsent_bytes(n_bytes * n_copies)
                except HttpError as error:
                    raise GenerationFailedError(read.delta, error) from None
            yield (turn, block, text), named

    def _encode_step(
        self, head: bytes, happened: list[tuple[BlockChange, TextLogprobs]], is_last: bool
    ) -> Iterator[bytes]:
        """Yield all events of a step as one block, except those that have all of a text's log probabilities.

        In the background they wait in a queue anyhow, which takes what a step has to tell as one.
        """
        is_apart = bool(self._logprobs) and not self.reply.background
        together = [head]
        for (turn, block, text), named in happened:
            for event in self._events(turn, block, text, named):
                if is_apart and turn is BlockEvent.CLOSED:
                    yield b"".join(together)
                    together = []
                together.append(event)
        if is_last:
            if is_apart:
                yield b"".join(together)
                together = []
            together.append(self._event(f"response.{self.reply.status}", response=self.reply))
        yield b"".join(together)

    def _finish(self, last: Delta) -> None:
        is_cut_off = self.generation.finish_of(last) == "length"
        self._settle(is_cut_off)
        self.reply.status = "incomplete" if is_cut_off else "completed"
        self.reply.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut_off else None
        if self.on_finish is not None:
            self.on_finish()

    def _settle(self, is_cut_off: bool = False) -> None:
        """Write output and usage so far into the reply."""
        self.reply.output = [self._item(block, self._status(block, is_cut_off)) for block in self._blocks.all]
        usage = self.generation.usage
        self.reply.usage = ResponseUsage(
            usage.prompt_tokens, InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens, OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )  # fmt: skip

    def _status(self, block: AnswerBlock, is_cut_off: bool) -> str:
        """Return the status of a finished block; if the answer was cut off, its last block is incomplete."""
        return "incomplete" if is_cut_off and block is self._blocks.all[-1] else "completed"

    def _item(self, block: AnswerBlock, status: str, text: str | None = None) -> Item:
        """Return a block as an item. text: replaces the block's"""
        while len(self._item_ids) <= block.index:
            self._item_ids.append(uuid.uuid4().hex)
        own_id, text = self._item_ids[block.index], block.text if text is None else text
        match block.kind:
            case BlockKind.TEXT:
                return MessageItem(f"msg_{own_id}", [self._part(block)] if text else [], status)
            case BlockKind.REASONING:
                return ReasoningItem(f"rs_{own_id}", [ReasoningText(text)] if text else [], status)
            case BlockKind.CALL:
                return CallItem(f"fc_{own_id}", block.call_id, block.name, text, status)

    def _part(self, block: AnswerBlock) -> OutputText:
        """Return a block's text so far as a part."""
        logprobs = self._logprobs.get(block.index)
        return OutputText(block.text, logprobs=[] if logprobs is None else logprobs.so_far())

    def _events(self, turn: BlockEvent, block: AnswerBlock, text: str, named: TextLogprobs = ()) -> Iterator[bytes]:
        """Yield the events of a change. named: log probabilities of the added text"""
        is_closed = turn is BlockEvent.CLOSED
        status = self._status(block, self.reply.status == "incomplete") if is_closed else "in_progress"
        item = self._item(block, status, None if is_closed else "")
        i, is_text = block.index, block.kind is BlockKind.TEXT
        if block.kind is BlockKind.CALL:
            yield from self._events_of_call(turn, block, text, item)
            return
        at: dict[str, object] = {"output_index": i, "item_id": item.id, "content_index": 0}
        name = "output_text" if is_text else "reasoning_text"
        match turn:
            case BlockEvent.OPENED:
                yield self._event("response.output_item.added", output_index=i, item=item)
                part = OutputText("") if is_text else ReasoningText("")
                yield self._event("response.content_part.added", **at, part=part)
            case BlockEvent.ADDED:
                of_text = {"logprobs": named} if is_text else {}
                yield self._event(f"response.{name}.delta", **at, delta=text, **of_text)
            case BlockEvent.CLOSED:
                closed_part = self._part(block) if is_text else ReasoningText(block.text)
                of_text = {"logprobs": closed_part.logprobs} if isinstance(closed_part, OutputText) else {}
                yield self._event(f"response.{name}.done", **at, text=block.text, **of_text)
                yield self._event("response.content_part.done", **at, part=closed_part)
                yield self._event("response.output_item.done", output_index=i, item=item)

    def _events_of_call(self, turn: BlockEvent, block: AnswerBlock, text: str, item: Item) -> Iterator[bytes]:
        at: dict[str, object] = {"output_index": block.index, "item_id": item.id}
        match turn:
            case BlockEvent.OPENED:
                yield self._event("response.output_item.added", output_index=block.index, item=item)
            case BlockEvent.ADDED:
                yield self._event("response.function_call_arguments.delta", **at, delta=text)
            case BlockEvent.CLOSED:
                done = "response.function_call_arguments.done"
                yield self._event(done, **at, name=block.name, arguments=block.text)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._n_events, **fields)  # type: ignore[arg-type]
        self._n_events += 1
        return encode_named_event(kind, event)
