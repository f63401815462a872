"""Every reader of a trace takes the same lines: bench's requests, its histogram, and a recording for a build."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.bench.load.length_histogram import read_histogram
from millrace.bench.load.trace_files import read_requests
from millrace.errors import ConfigError
from millrace.tune import trace_formats
from millrace.tune.recorded_requests import read_recording

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
READERS: tuple[Callable[[Path], object], ...] = (
    lambda path: read_requests(path, None, 0), read_recording, read_histogram,
)  # fmt: skip
NOON = 1_715_342_400  # 2024-05-10 12:00:00 UTC


@pytest.mark.parametrize(
    "zone, since_noon_s",
    [("", 0), ("Z", 0), ("+00:00", 0), ("+05:00", -18_000), (".5000000+05:00", -17_999.5), (".2500001", 0.25)],
)
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n", b"\xef\xbb\xbf \r\n\n"])
def test_one_time_is_one_time(tmp_path: Path, zone: str, since_noon_s: float, before: bytes) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(before + f"{HEAD}2024-05-10 12:00:00{zone},10,5\n".encode())
    assert read_requests(path, None, 0).entries[0].at_s == NOON + since_noon_s
    found = read_recording(path)
    assert (found.at_s.tolist(), found.n_input.tolist(), found.n_output.tolist()) == ([NOON + since_noon_s], [10], [5])
    assert read_histogram(path).bins == [(10, 10, 5, 5)]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,Tokens\n1,2\n", HEAD + "2024-05-10 12:00:00,1\n", HEAD + "2024-05-10 12:00:00,1,2,3\n",
        HEAD + "2024-05-10 12:00:00,-1,2\n", HEAD + "2024-05-10 12:00:00,1,10000001\n", HEAD + "noon,1,2\n",
        HEAD + "2024-05-10 12:00:00,\xff,2\n", HEAD + "1" * 131_073, HEAD + "\n\n" + " " * 500,
    ],
)  # fmt: skip
def test_one_mistake_is_one_mistake(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_formats, "MAX_LINE", 200_000 if "1" * 9 in text else 400)
    path, said = tmp_path / "azure.csv", set()
    path.write_text(text, encoding="latin-1")
    for read in READERS:
        with pytest.raises(ConfigError) as error:
            read(path)
        said.add(str(error.value))
    assert len(said) == 1 and f"{path}, line {1 if text[10] == 'T' else 4 if text.endswith(' ') else 2}: " in said.pop()


def test_a_file_that_is_too_large_is_read_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    monkeypatch.setattr(trace_formats, "MAX_FILE", 20)
    for read in READERS:
        with pytest.raises(ConfigError, match="has 56 bytes"):
            read(path)
