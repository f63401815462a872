"""The files that hold traces: JSON whenever they are read, of a size, and no reason to fail."""

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.model_repository.tracing import trace_files
from tests.support.traces import come, tracer, traces


@pytest.mark.parametrize("seed", range(3))
def test_files_are_json_whenever_they_are_read(tmp_path: Path, seed: int) -> None:
    rng, files, n = random.Random(seed), trace_files.TraceFiles(), 0
    for _ in range(400):
        files.add(str(tmp_path / "t"), 0, [b'{"id":%d}' % n] * rng.randint(1, 3))
        n += 1
        if rng.random() < 0.02:
            files.write()
            assert {one["id"] for one in json.loads((tmp_path / "t").read_text())} == set(range(n))
    files.write()
    assert {one["id"] for one in json.loads((tmp_path / "t").read_text())} == set(range(n))


def test_a_few_traces_are_written_soon(tmp_path: Path) -> None:
    due: list[tuple[float, Callable[[], None]]] = []
    one = trace_files.TraceFiles(lambda seconds, call: due.append((seconds, call)))
    one.add(str(tmp_path / "t"), 0, [b'{"id":1}'])
    one.add(str(tmp_path / "t"), 0, [b'{"id":2}'])
    assert [seconds for seconds, _ in due] == [trace_files.FLUSH_S] and not (tmp_path / "t").exists()
    due.pop()[1]()
    assert json.loads((tmp_path / "t").read_text()) == [{"id": 1}, {"id": 2}]
    one.add(str(tmp_path / "t"), 0, [b'{"id":3}'])
    one.write()
    due.pop()[1]()
    assert json.loads((tmp_path / "t").read_text())[2:] == [{"id": 3}], "nothing is written twice"
    one.add(str(tmp_path / "t"), 3, [b'{"id":4}'])
    assert not due, "a file of its own is written when it is whole"
    one.write()
    assert json.loads((tmp_path / "t.0").read_text()) == [{"id": 4}], "or at the end, as one of them"


def test_a_number_of_traces_is_a_file(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t", log_frequency=2)
    come(one, "m", 5)
    one.close()
    assert [list(traces(tmp_path / f"t.{i}")) for i in range(3)] == [[1, 2], [3, 4], [5]]
    assert len(list(tmp_path.iterdir())) == 3


def test_so_many_files_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may ask for a file each."""
    monkeypatch.setattr(trace_files, "MAX_FILES", 5)
    one = tracer(tmp_path / "t", log_frequency=1)
    come(one, "m", 13)
    one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"t.{i}" for i in range(5)]
    assert sorted(number for i in range(5) for number in traces(tmp_path / f"t.{i}")) == [9, 10, 11, 12, 13]


def test_files_end_at_a_size_or_where_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_BYTES", 10_000)
    one = tracer(tmp_path / "t")
    come(one, "m", 1000)
    one.close()
    assert 10_000 < (tmp_path / "t").stat().st_size < 30_000 and len(traces(tmp_path / "t")) < 1000
    nowhere = tracer(tmp_path / "none" / "t")
    assert len(come(nowhere, "m", 200)) == 200, "inferences go on"
    nowhere.close()


@pytest.mark.parametrize("frequency", [0, 5])
def test_where_the_disk_is_full_what_is_there_stays_json(tmp_path: Path, frequency: int) -> None:
    """A file may have 300 bytes, which end within a trace."""
    files, before = trace_files.TraceFiles(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        for n in range(60):
            files.add(str(tmp_path / "t"), frequency, [b'{"id":%d,"of":"%b"}' % (n, b"x" * n)])
            if not frequency and n % 3 == 2:
                files.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files.is_full
    found = [one["id"] for path in sorted(tmp_path.iterdir()) for one in json.loads(path.read_text())]
    assert found == list(range(len(found))) and 0 < len(found) < 60
