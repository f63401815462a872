"""Blocks are the same however an answer came in pieces."""

import random

import pytest

from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, joined
from millrace.checkpoint.tool_calls.formats import HERMES, Reasoning
from millrace.serve.llm.answer_blocks import BlockEvent, BlockKind, Blocks

TEXT = (
    '<think>so</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '
    '<tool_call>{"name": "g", "arguments": {}}</tool_call> done'
)
KINDS = [(BlockKind.REASONING, "so"), (BlockKind.TEXT, "Look:"), (BlockKind.CALL, '{"a": 1}'), (BlockKind.TEXT, " and")]
KINDS += [(BlockKind.CALL, "{}"), (BlockKind.TEXT, " done")]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_change_nothing(seed: int) -> None:
    """Where a block is over and another began in one piece, what goes on with the first is its own."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(TEXT)), rng.randint(0, 40) if seed else len(TEXT) - 1))
    reader, blocks, turns = AnswerParser(HERMES, Reasoning()), Blocks(lambda: "id"), list[tuple[BlockEvent, int]]()
    for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        said = reader.push(TEXT[a:b])
        if b == len(TEXT):
            said = joined(said, reader.flush())
        turns += [(turn, block.index) for turn, block, _ in blocks.add(said)]
    turns += [(turn, block.index) for turn, block, _ in blocks.close()]
    calls = [(block.kind, block.text) for block in blocks.all if block.kind is BlockKind.CALL]
    assert calls == [(BlockKind.CALL, '{"a": 1}'), (BlockKind.CALL, "{}")]
    assert blocks.text(BlockKind.REASONING) == "so" and blocks.text(BlockKind.TEXT) == "Look: and done"
    for index in range(len(blocks.all)):
        own = [turn for turn, i in turns if i == index]
        assert own[0] is BlockEvent.OPENED and own[-1] is BlockEvent.CLOSED and set(own[1:-1]) <= {BlockEvent.ADDED}
    if seed == 0:
        assert [(block.kind, block.text) for block in blocks.all] == KINDS
