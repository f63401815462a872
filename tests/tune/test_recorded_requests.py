"""Recordings are read whole, in the order of arrival; a bad line names itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.tune import trace_formats
from millrace.tune.recorded_requests import read_recording
from tests.tune.traffic_files import line, recording


def test_lines_come_in_the_order_of_arrival_with_their_blocks(tmp_path: Path) -> None:
    found = recording(tmp_path / "r", [
        line(2, 600, 10, hash_ids=[7, 8, 9, 9], duration=5000, waited=1000, max_tokens=30),
        line(0, 10, 9, hash_ids=[4], duration=9000, choices=4),
        line(1, 0, 1, duration=1),
    ])  # fmt: skip
    assert (found.at_s - found.at_s[0]).tolist() == [0, 1, 2] and found.dated and found.span_s == 2
    assert found.n_input.tolist() == [10, 0, 600] and found.answers.tolist() == [3, 1, 10]
    assert found.needed.tolist() == [13, 1, 630] and found.stay_s is not None and found.waited_s is not None
    assert found.stay_s.tolist() == [9, 0.001, 4] and found.waited_s.tolist() == [0, 0, 1]
    blocks = list(zip(found.block_of.tolist(), found.block_id.tolist(), strict=True))
    assert blocks == [(0, 4), (2, 7), (2, 8)], "600 tokens have two blocks, whatever ids there are"


def test_traces_of_others_are_read_too(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                     "2023-11-16 18:15:50.9951690,396,109")  # fmt: skip
    found = read_recording(azure)
    assert found.n_input.tolist() == [374, 396] and found.n_output.tolist() == [44, 109] and found.stay_s is None
    assert found.span_s == pytest.approx(4.314579) and found.dated
    assert found.at_s[0] == pytest.approx(np.datetime64("2023-11-16T18:15:46.680590", "us").astype(int) / 1e6)
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 3000, "input_length": 3, "output_length": 4, "hash_ids": [0]}\n\n')
    assert not read_recording(mooncake).dated


GOOD = line(0, 5, 5, duration=10)


@pytest.mark.parametrize("bad, said", [
    ("[]", "line 2: Expected `object`"),
    ("{", "line 2: Input data was truncated"),
    ("\xff", "line 2: "),
    (json.dumps({**GOOD, "input_length": "5"}), "line 2: Expected `int`, got `str` - at `$.input_length`"),
    (json.dumps({**GOOD, "input_length": -1}), "line 2: Expected `int` >= 0"),
    (json.dumps({**GOOD, "output_length": 10**8}), "line 2: Expected `int` <= 10000000"),
    (json.dumps({**GOOD, "timestamp": 1e16}), "line 2: Expected `float` <= 1"),
    (json.dumps({**GOOD, "duration": -1}), "line 2: Expected `float` >= 0"),
    (json.dumps({**GOOD, "waited": 11}), 'line 2: "waited" is 11'),
    (json.dumps({**GOOD, "choices": 0}), "line 2: Expected `int` >= 1"),
    (json.dumps({**GOOD, "hash_ids": [2**70]}), "line 2: "),
    (json.dumps(line(0, 5, 5)), 'line 2: no "duration"'),
    ('{"text": "Hello", "max_tokens": 5}', "line 2: Object missing required field `timestamp`"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens", "line 2: "),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{bad}\n", encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        read_recording(path)
    assert f"{path}, {said}" in str(error.value)


@pytest.mark.parametrize("bad", ["2023-11-16 18:15:46,3", "yesterday,1,2", "2023-11-16 18:15:46,1,-2", "a,b,c,d",
                                 "2023-11-16 18:15:46+99:00,1,2", "2023-11-16 18:15:46,99999999,2"])  # fmt: skip
def test_a_bad_line_of_a_table_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,1,2\n{bad}\n")
    with pytest.raises(ConfigError, match=r"line 3: "):
        read_recording(path)
    path.write_text("TIMESTAMP,Tokens\n1,2\n")
    with pytest.raises(ConfigError, match=r"line 1: TIMESTAMP,Tokens"):
        read_recording(path)


def test_what_is_no_recording_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, said in (("empty", "holds no request"), ("absent", "cannot be read"), ("", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_recording(tmp_path / name)
    monkeypatch.setattr(trace_formats, "MAX_LINE", 100)
    (tmp_path / "long").write_text(json.dumps(GOOD) + "\n" + " " * 101)
    with pytest.raises(ConfigError, match="line 2: more than 100 bytes"):
        read_recording(tmp_path / "long")
    monkeypatch.setattr(trace_formats, "MAX_FILE", 50)
    with pytest.raises(ConfigError, match="at most 50"):
        read_recording(tmp_path / "long")
