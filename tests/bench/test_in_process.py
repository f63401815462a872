"""What an engine in this process is asked: tokens of exactly the lengths wanted, alike where prompts are."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from millrace.bench.client.in_process import RandomTokens
from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import LengthPattern, Prefixes, Session, synthetic
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.load.trace_files import read_requests

VOCAB = 997


def tokens(sessions: Iterable[Session], seed: int = 0) -> list[list[int]]:
    drawn = RandomTokens(seed, VOCAB)
    turns = [s.turns[0] for s in sessions]
    return [drawn.for_text(t.text, t.n_input or 0) for t in turns]


def test_prompts_of_a_trace_begin_alike_where_its_numbers_say_so(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [1, 9]},
        {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = tokens(read_requests(path, None, 0).sessions(PromptWords()))
    assert [len(first), len(second), len(third)] == [1030, 700, 512]
    assert first[:512] == second[:512] and first[512:700] != second[512:]
    assert sum(a == b for a, b in zip(first[:512], third, strict=True)) < 20, "others have nothing in common"


def test_shared_beginnings_are_shared_and_tokens_are_of_the_whole_vocabulary() -> None:
    def sessions() -> Iterable[Session]:
        return islice(synthetic([LengthPattern(Spread(200), Spread(1))], PromptWords(), 3, Prefixes(1, 120)), 200)

    found = tokens(sessions())
    assert len({tuple(p[:120]) for p in found}) == 1 and len({tuple(p[:130]) for p in found}) == 200
    counts = np.bincount(np.array([p[120:] for p in found]).reshape(-1), minlength=VOCAB)
    assert counts.size == VOCAB and counts.sum() == 16_000 and counts.min() > 0 and counts.max() < 60, "about 16 each"
    assert found == tokens(sessions()) and found[0] != tokens(sessions(), seed=1)[0]


def test_a_text_of_other_length_is_cut_or_filled() -> None:
    drawn = RandomTokens(0, VOCAB)
    assert drawn.for_text("a b c", 2) == drawn.for_text("a b", 2)
    assert len(drawn.for_text("a", 5000)) == 5000 and drawn.for_text("a", 5000)[:2] == drawn.for_text("a", 2)
