"""What `--record` keeps of requests: lengths, arrivals, shared beginnings; and nothing of a text."""

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.load.trace_files import read_requests
from millrace.errors import ConfigError
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.service import ServiceOptions
from millrace.serve.ops import request_recorder as bounds
from millrace.serve.ops.request_recorder import RecordedEngine, Recorder
from millrace.tune.trace_formats import BLOCK
from tests.runtime.fakes import limits, make_loop

RNG = np.random.default_rng(1)


def tokens(n: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return RNG.integers(0, 1000, n).astype(np.int32)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path, *prompts: Any) -> list[dict[str, Any]]:
    recorder = Recorder(path)
    for i, prompt in enumerate(prompts):
        recorder.write(10 + i / 2, prompt, 5 + i)
    recorder.close()
    return lines(path)


def test_prompts_that_begin_alike_share_numbers_as_far_as_they_do(tmp_path: Path) -> None:
    first = tokens(2 * BLOCK + 10)
    other_end, other_middle = first.copy(), first.copy()
    other_end[-1] += 1
    other_middle[BLOCK] += 1
    told = recorded(tmp_path / "r", first, first, other_end, other_middle, first[:BLOCK], tokens(1), tokens(0))
    a, b, c = told[0]["hash_ids"]
    assert told[1]["hash_ids"] == [a, b, c] and told[2]["hash_ids"][:2] == [a, b] != told[2]["hash_ids"][1:]
    assert told[3]["hash_ids"][0] == a and not {b, c} & set(told[3]["hash_ids"]), (
        "what follows another block is another"
    )
    assert told[4]["hash_ids"] == [a] and len(told[5]["hash_ids"]) == 1 and told[6]["hash_ids"] == []
    numbers = [n for line in told for n in line["hash_ids"]]
    assert sorted(set(numbers)) == list(range(len(set(numbers)))), (
        "they count up, and tell nothing of what they stand for"
    )


def test_the_trace_is_replayed(tmp_path: Path) -> None:
    shared = tokens(BLOCK)
    recorded(tmp_path / "r", np.concatenate([shared, tokens(88)]), np.concatenate([shared, tokens(38)]))
    first, second = read_requests(tmp_path / "r", None, 0).sessions(PromptWords())
    assert (first.at_s, second.at_s) == (0, 0.5) and (first.turns[0].max_tokens, second.turns[0].max_tokens) == (5, 6)
    texts = [s.turns[0].text.split() for s in (first, second)]
    assert [len(t) for t in texts] == [600, 550] and texts[0][:BLOCK] == texts[1][:BLOCK] != texts[0][38 : 38 + BLOCK]


def test_another_recording_has_other_digests(tmp_path: Path) -> None:
    one, other = Recorder(tmp_path / "a"), Recorder(tmp_path / "b")
    prompt = tokens(10)
    assert one._beginnings(prompt) == other._beginnings(prompt) == [0]
    assert not set(one._block_numbers) & set(other._block_numbers)
    one.close()
    other.close()


def test_file_and_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_BYTES", 300)
    monkeypatch.setattr(bounds, "MAX_BLOCKS", 3)
    recorder = Recorder(tmp_path / "r")
    for _ in range(50):
        recorder.write(1.0, tokens(3), 1)
    assert 300 < (tmp_path / "r").stat().st_size < 400 and len(recorder._block_numbers) == 3


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit on a file's size is a disk that takes half a line, and then no more."""
    path, prompt = tmp_path / "r", tokens(3)
    recorder = Recorder(path)
    recorder.write(1.0, prompt, 1)
    n = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n + n // 2, hard))
    try:
        recorder.write(2.0, prompt, 1)
        recorder.write(3.0, prompt, 1)
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == n and [line["timestamp"] for line in lines(path)] == [1000.0]
    assert caplog.text.count("nothing more is recorded: the file cannot be written (File too large)") == 1
    assert len(list(read_requests(path, None, 0).sessions(PromptWords()))) == 1


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    for path in (tmp_path / "r", tmp_path / "absent" / "r"):
        with pytest.raises(ConfigError, match=r"exists|cannot be written"):
            Recorder(path)
    assert (tmp_path / "r").read_text() == "mine"


def test_what_each_line_says_of_a_stay(tmp_path: Path) -> None:
    """By the wall clock, from outside: the one of two places is taken, so the second request waits for the first."""
    asked = [SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=3, n=1, ignore_eos=True),
             SamplingParams(max_tokens=4, n=2, ignore_eos=True), SamplingParams(max_tokens=None, seed=1)]  # fmt: skip

    async def ask() -> float:
        loop = make_loop(limits(max_sequences=1), lambda step: time.sleep(0.002), clock=time.perf_counter)
        async with RecordedEngine(loop, ServiceOptions(), Recorder(tmp_path / "r")) as engine:
            handles = [engine.submit([[5, 6, i]], [params]) for i, params in enumerate(asked)]
            for handle in handles:
                async for _ in handle:
                    pass
        return time.time()

    began_s = time.time()
    ended_s = asyncio.run(ask())
    first, second, pair, open_ended = lines(tmp_path / "r")
    for line in (first, second, pair, open_ended):
        assert began_s <= line["timestamp"] / 1e3 <= ended_s, "milliseconds since 1970"
        assert 0 <= line["waited"] <= line["duration"] <= 1e3 * (ended_s - began_s)
    assert first["duration"] - first["waited"] >= 40 * 2, "40 steps of 2 ms at least"
    assert second["waited"] >= 40 * 2 - 5 and second["waited"] > first["waited"]
    assert [line.get("max_tokens") for line in (first, second, pair, open_ended)] == [40, 3, 4, None]
    assert [line.get("choices") for line in (first, second, pair, open_ended)] == [None, None, 2, None]
    assert pair["output_length"] == 8
