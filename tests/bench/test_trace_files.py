"""Prompts and traces from files; whatever is wrong with one is said with its line."""

import json
import sys
from pathlib import Path

import pytest

from millrace.bench.load.inputs import Session
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.load.trace_files import InputRequests, read_requests
from millrace.errors import ConfigError

MOONCAKE = """{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 1000, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 9]}
{"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": []}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def given(folder: Path, text: str | bytes) -> InputRequests:
    path = folder / "requests"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_requests(path, 11, seed=0)


def sessions(folder: Path, text: str, speed: float = 1.0) -> list[Session]:
    return list(given(folder, text).sessions(PromptWords(), speed))


def test_a_mooncake_trace(tmp_path: Path) -> None:
    first, second, third = sessions(tmp_path, MOONCAKE)
    assert [s.at_s for s in (first, second, third)] == [0, 0.5, 2.0], "in order of time, from the first"
    texts = [s.turns[0].text.split() for s in (first, second, third)]
    assert [len(t) for t in texts] == [1500, 600, 1100] and [s.turns[0].max_tokens for s in (first, second, third)] == [
        7, 1, 5,
    ]  # fmt: skip
    assert texts[0][:1024] == texts[2][:1024] and texts[0][1024:1100] != texts[2][1024:], "equal ids are equal text"
    assert texts[1][:500] != texts[0][:500]


def test_an_azure_trace_at_twice_its_speed(tmp_path: Path) -> None:
    first, second = sessions(tmp_path, AZURE, speed=2)
    assert first.at_s == 0 and second.at_s == pytest.approx(4.314579 / 2, abs=1e-6)
    assert (second.turns[0].n_input, second.turns[0].max_tokens) == (396, 109)
    assert [s.at_s for s in sessions(tmp_path, AZURE, speed=0)] == [0, 0]


def test_times_of_a_zone_are_set_beside_those_without(tmp_path: Path) -> None:
    times = ["00:00:05+00:00", "02:00:07.5000001+02:00", "00:00:09", "00:00:10Z"]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2024-05-10 {time},1,1" for time in times)])
    assert [s.at_s for s in sessions(tmp_path, text)] == [0, 2.5, 4, 5]


CHAT = json.dumps([{"conversations": [{"from": "human", "value": "a"}]}])


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, CHAT])
@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b" \r\n\n ", b"\xef\xbb\xbf\n", b"\n" * 70_000])
def test_what_stands_before_it_does_not_count(tmp_path: Path, text: str, before: bytes) -> None:
    found = given(tmp_path, before + text.encode())
    assert len(found.entries) == len(given(tmp_path, text).entries)
    assert [s.at_s for s in found.sessions(PromptWords())] == [s.at_s for s in sessions(tmp_path, text)]


def test_lines_of_prompts(tmp_path: Path) -> None:
    lines = [
        {"text": "a"}, {"prompt": "b", "max_tokens": 3}, {"text_input": "c", "output_length": 4},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"turns": [{"text": "d"}, {"text": "e", "delay": 500, "max_tokens": 2}]},
    ]  # fmt: skip
    found = sessions(tmp_path, "\n\n".join(map(json.dumps, lines)))
    assert [[(t.text, t.max_tokens, t.pause_s) for t in s.turns] for s in found] == [
        [("a", 11, 0)], [("b", 3, 0)], [("c", 4, 0)], [("u", 11, 0)], [("d", 11, 0), ("e", 2, 0.5)],
    ]  # fmt: skip
    assert found[3].turns[0].history == (("system", "s"),) and found[0].at_s is None


def test_sharegpt(tmp_path: Path) -> None:
    told = [
        {"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                      {"from": "human", "value": "c"}]},
        {"conversations": [{"from": "gpt", "value": "only an answer"}]},
    ]  # fmt: skip
    (found,) = sessions(tmp_path, json.dumps(told))
    assert [t.text for t in found.turns] == ["a", "c"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no request"), ("\n\n", "holds no request"), ("[]", "holds no request"), ("[1", "is not JSON"),
        ("[1]", "line 1: no list of conversations"), (b"\xff\xfe", "not UTF-8"),
        ('{"text": "a"}\n{"text": ', "line 2: not JSON"), ('{"text": "a"}\n7', "line 2"),
        ('{"text": ""}', "line 1: no prompt"), ('{"txt": "a"}', "line 1: no prompt"),
        ('{"text": "a", "max_tokens": "many"}', """line 1: "max_tokens" is 'many'"""),
        ('{"text": "a", "delay": -1}', 'line 1: "delay"'), ('{"messages": [{"role": "user"}]}', "line 1: the message"),
        ('{"turns": [7]}', "line 1: no prompt"),
        (MOONCAKE.replace("1500,", '"x",', 1), 'line 2: "input_length"'),
        (MOONCAKE.replace("[1, 2, 9]", "7"), 'line 2: "hash_ids"'),
        (MOONCAKE.replace('"timestamp": 1500', '"timestamp": null'), 'line 3: "timestamp" is None'),
        (MOONCAKE.replace("600", "60000000"), 'line 3: "input_length" is 60000000'),
        (MOONCAKE + '{"text": "a"}', "times for some"), ("[" * 100_000, "is not JSON"),
        (AZURE.replace("396,109", "396"), "line 3"), (AZURE.replace("396", "many"), "line 3"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "line 3"), (AZURE.replace("396", "-1"), "line 3: -1 and"),
        ("TIMESTAMP,Context\n1,2", "line 1"), ("T" * 131_073, "line 1: no CSV: field larger"),
        (AZURE + "1" * 131_073 + ",1,1", "line 4: no CSV: field larger"),
        (AZURE.replace("396", "1" * 5000), "line 3"), (AZURE.replace("50.9951690", "50.9951690+99:00"), "line 3"),
        (MOONCAKE + '{"timestamp": ' + "1" * 5000 + "}", "line 4: not JSON"), ("[" + "1" * 5000 + "]", "is not JSON"),
        ('{"text": "a"}\n{"text": "\\ud800"}', "line 2: the text has \\ud800"),
        ('{"turns": [{"text": "a"}, {"text": "b\\udfff"}]}', "line 1: the text has \\udfff"),
        ('{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}', "line 1: the text has \\udc00"),
        ('{"messages": [{"role": "\\ud800", "content": "a"}]}', "line 1: the text has \\ud800"),
        (CHAT[:-1] + ", " + CHAT[1:].replace('"a"', '"\\ud83d"'), "line 2: the text has \\ud83d"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        given(tmp_path, text)
    assert said in str(error.value) and str(tmp_path / "requests") in str(error.value)


def test_lines_as_deep_as_can_just_be_read(tmp_path: Path) -> None:
    """What can be read need not be short enough to be shown."""
    for name in ("text", "turns", "timestamp", "delay", "messages"):
        for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit()):
            with pytest.raises(ConfigError, match="line 1"):
                given(tmp_path, f'{{"{name}": {"[" * depth}{"]" * depth}}}')


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_requests(path, None, 0)
