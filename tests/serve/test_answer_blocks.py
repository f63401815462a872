"""Blocks are the same however an answer came in pieces."""

import random

import pytest

from millrace.checkpoint.tool_calls.answer_parser import Reader, joined
from millrace.checkpoint.tool_calls.formats import HERMES, Reasoning
from millrace.serve.llm.answer_blocks import Blocks, Kind, Turn

TEXT = (
    '<think>so</think>Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '
    '<tool_call>{"name": "g", "arguments": {}}</tool_call> done'
)
KINDS = [(Kind.REASONING, "so"), (Kind.TEXT, "Look:"), (Kind.CALL, '{"a": 1}'), (Kind.TEXT, " and")]
KINDS += [(Kind.CALL, "{}"), (Kind.TEXT, " done")]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_change_nothing(seed: int) -> None:
    """Where a block is over and another began in one piece, what goes on with the first is its own."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(TEXT)), rng.randint(0, 40) if seed else len(TEXT) - 1))
    reader, blocks, turns = Reader(HERMES, Reasoning()), Blocks(lambda: "id"), list[tuple[Turn, int]]()
    for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        said = reader.push(TEXT[a:b])
        if b == len(TEXT):
            said = joined(said, reader.flush())
        turns += [(turn, block.index) for turn, block, _ in blocks.add(said)]
    turns += [(turn, block.index) for turn, block, _ in blocks.close()]
    calls = [(block.kind, block.text) for block in blocks.all if block.kind is Kind.CALL]
    assert calls == [(Kind.CALL, '{"a": 1}'), (Kind.CALL, "{}")]
    assert blocks.text(Kind.REASONING) == "so" and blocks.text(Kind.TEXT) == "Look: and done"
    for index in range(len(blocks.all)):
        own = [turn for turn, i in turns if i == index]
        assert own[0] is Turn.OPENED and own[-1] is Turn.CLOSED and set(own[1:-1]) <= {Turn.ADDED}
    if seed == 0:
        assert [(block.kind, block.text) for block in blocks.all] == KINDS
