"""Answers as consecutive blocks: reasoning, text, tool calls. Used by collected answers and by all streams but chats.

Each block is opened, appended to, and closed before the next one begins.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from millrace.checkpoint.tool_calls.answer_parser import CallPart, ParsedDelta


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class AnswerBlock:
    """One block of an answer. name, call_id: of a tool call, whose text is the JSON of its arguments"""

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a tool call as an object; text that is no JSON object is put under its own key."""
        try:
            arguments = json.loads(self.text)
        except (ValueError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"_not_an_object": self.text}


class BlockEvent(Enum):
    OPENED = auto()
    ADDED = auto()
    CLOSED = auto()


BlockChange = tuple[BlockEvent, AnswerBlock, str]  # the text that was added


class Blocks:
    """The blocks of one answer so far."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.all: list[AnswerBlock] = []
        self._new_call_id = new_call_id

    def add(self, delta: ParsedDelta) -> Iterator[BlockChange]:
        """Add a delta and yield the changes. A continued tool call comes before the rest of the delta."""
        calls = delta.calls
        if calls and calls[0].name is None:
            yield self._append(calls[0].arguments)
            calls = calls[1:]
        for kind, text in ((BlockKind.REASONING, delta.reasoning), (BlockKind.TEXT, delta.content)):
            if text:
                if self._open is None or self._open.kind is not kind:
                    yield from self._begin(kind)
                yield self._append(text)
        for part in calls:
            yield from self._begin(BlockKind.CALL, part)
            if part.arguments:
                yield self._append(part.arguments)

    def push(self, delta: ParsedDelta) -> None:
        """Add a delta without reporting the changes."""
        for _ in self.add(delta):
            pass

    def text(self, kind: BlockKind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.all if block.kind is kind)

    def calls(self) -> list[AnswerBlock]:
        return [block for block in self.all if block.kind is BlockKind.CALL]

    def close(self) -> Iterator[BlockChange]:
        """Close the open block, because the answer is complete or another block begins."""
        if self._open is not None:
            self._open.closed = True
            yield BlockEvent.CLOSED, self.all[-1], ""

    @property
    def _open(self) -> AnswerBlock | None:
        return self.all[-1] if self.all and not self.all[-1].closed else None

    def _begin(self, kind: BlockKind, part: CallPart | None = None) -> Iterator[BlockChange]:
        yield from self.close()
        block = AnswerBlock(len(self.all), kind)
        if part is not None:
            block.name, block.call_id = part.name or "", self._new_call_id()
        self.all.append(block)
        yield BlockEvent.OPENED, block, ""

    def _append(self, text: str) -> BlockChange:
        self.all[-1].pieces.append(text)
        return BlockEvent.ADDED, self.all[-1], text
