"""Results that are kept: gone on with after any end, and of nothing else than what is asked."""

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from millrace.errors import ConfigError, MachineError
from millrace.evaluate import resumable_results as module
from millrace.evaluate.resumable_results import (
    ChosenAnswer,
    Results,
    ResultsInputs,
    ResumableResults,
    check_same,
    check_whole,
    compare_results,
    read,
)

ABOUT = ResultsInputs("m", "engine-1", "default w8a8", "mmlu, lm-eval, 5 shots", "data-1")
SOME = [ChosenAnswer("law", i, i % 4, 0, [-0.5, -1.0, -2.0, -3.25], cut=i == 2) for i in range(3)]


def written(path: Path) -> Path:
    with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as kept:
        for one in SOME:
            kept.add(one)
    return path


def test_what_was_added_is_found_again(tmp_path: Path) -> None:
    path = written(tmp_path / "deeper" / "results.jsonl")
    with closing(ResumableResults(path, replace(ABOUT, model="another name"), ChosenAnswer)) as kept:
        assert kept.records == {one.key: one for one in SOME}
    assert [one.right for one in SOME] == [True, False, False]


def test_wherever_a_line_was_cut_the_others_are_there(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    path, head = tmp_path / "cut", whole.index(b"\n") + 1
    for size in range(head, len(whole)):
        path.write_bytes(whole[:size])
        n = whole[:size].count(b"\n") - 1
        with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as kept:
            assert list(kept.records) == [one.key for one in SOME[:n]]
            kept.add(SOME[n])
        assert list(read(path, ChosenAnswer).records.values()) == SOME[: n + 1]


@pytest.mark.parametrize("field", ["engine", "precision", "task", "data"])
def test_results_of_something_else(tmp_path: Path, field: str) -> None:
    path = written(tmp_path / "results")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"has results of the {field} .*\n.*'other'"):
        ResumableResults(path, replace(ABOUT, **{field: "other"}), ChosenAnswer)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "line"), [(b"hello\n", 1), (b'{"model": 1}\n', 1), (b"\n", 1), (b"no line", 1), (b"\xff\xfe\n", 1)]
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"notes:{line} is no line of results"):
        ResumableResults(path, ABOUT, ChosenAnswer)
    assert path.read_bytes() == content, "a file of somebody else's is left as it is"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"group": 3}\n', *lines[2:]]))
    with pytest.raises(ConfigError, match="results:3 is no line of results"):
        read(path, ChosenAnswer)


def test_an_answer_that_is_not_what_was_written_is_not_believed(tmp_path: Path) -> None:
    """Whichever byte of it is another: values that would do as well are no exception."""
    path = written(tmp_path / "results")
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for at in range(begin, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match=r"results:[2-4] is no line of results"):
            ResumableResults(path, ABOUT, ChosenAnswer)
    path.write_bytes(whole.replace(b'"chosen":0', b'"chosen":1', 1))
    with pytest.raises(ConfigError, match=r"results:2 .*its checksum is another"):
        read(path, ChosenAnswer)


def test_a_file_of_an_earlier_version_is_not_gone_on_with(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":1', 1))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"results of version 1\n.*version 2\n.*evaluate again"):
        ResumableResults(path, ABOUT, ChosenAnswer)
    assert path.read_bytes() == before


def test_a_first_line_that_was_cut_begins_the_file_anew(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    path, head = tmp_path / "cut", whole.index(b"\n") + 1
    for size in range(head):
        path.write_bytes(whole[:size])
        assert written(path).read_bytes() == whole, size
    path.write_bytes(whole[: head - 2] + b"?")
    with pytest.raises(ConfigError, match="cut:1 is no line of results"):
        ResumableResults(path, ABOUT, ChosenAnswer)
    assert path.read_bytes() == whole[: head - 2] + b"?", "nothing that only begins as ours"


def test_a_file_of_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "results"
    with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as first:
        first.add(SOME[0])
        with pytest.raises(ConfigError, match="results are in use by another run"):
            ResumableResults(path, ABOUT, ChosenAnswer)
        first.add(SOME[1])
        assert len(read(path, ChosenAnswer).records) == 2, "who only reads is let in"
    with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as second:
        assert list(second.records) == [one.key for one in SOME[:2]]
        second.add(SOME[2])
    assert list(read(path, ChosenAnswer).records.values()) == SOME


def test_a_file_that_is_too_large_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "results")
    before = path.read_bytes()
    monkeypatch.setattr(module, "_MAX_BYTES", len(before) - 1)
    with pytest.raises(ConfigError, match=rf"results is too large.*\n.*at most {len(before) - 1:,} bytes\n.*another"):
        ResumableResults(path, ABOUT, ChosenAnswer)
    assert path.read_bytes() == before
    monkeypatch.setattr(module, "_MAX_BYTES", len(before))
    with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as kept:
        with pytest.raises(ConfigError, match="too large"):
            kept.add(replace(SOME[0], number=9))
        assert list(kept.records.values()) == SOME
    assert path.read_bytes() == before, "none is written that could not be read again"


@contextmanager
def no_file_beyond(n_bytes: int) -> Iterator[None]:
    """As on a full disk: what fits is written, and what is left is an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    lines, path = whole.splitlines(keepends=True), tmp_path / "results"
    with closing(ResumableResults(path, ABOUT, ChosenAnswer)) as kept:
        kept.add(SOME[0])
        size = path.stat().st_size
        for room in (0, 1, len(lines[2]) - 1):
            with no_file_beyond(size + room), pytest.raises(MachineError, match=r"cannot write results to .*results: "):
                kept.add(SOME[1])
            assert path.read_bytes() == b"".join(lines[:2]) and list(kept.records) == [SOME[0].key]
        for one in SOME[1:]:
            kept.add(one)
    assert path.read_bytes() == whole
    with no_file_beyond(9), pytest.raises(MachineError, match="cannot write"):
        ResumableResults(tmp_path / "other", ABOUT, ChosenAnswer)
    assert written(tmp_path / "other").read_bytes() == whole, "and nobody holds it"


def test_what_is_written_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, write = written(tmp_path / "whole").read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    assert written(tmp_path / "parts").read_bytes() == whole


@pytest.mark.parametrize(
    ("task", "data", "n"), [("other", "data-1", 3), (ABOUT.task, "other", 3), (ABOUT.task, "data-1", 4)]
)
def test_answers_to_other_questions(task: str, data: str, n: int) -> None:
    before = Results(ABOUT, {one.key: one for one in SOME})
    check_same(before, ABOUT.task, ABOUT.data, 3)
    with pytest.raises(ConfigError, match=rf"of other questions: mmlu.*, 3 answered\n.*{task}, {n} answered"):
        check_same(before, task, data, n)


def test_answers_to_what_nobody_asked_are_not_counted(tmp_path: Path) -> None:
    found = read(written(tmp_path / "results"), ChosenAnswer)
    check_whole(found, 3)
    for n in (2, 4):
        with pytest.raises(ConfigError, match=f"has 3 answers\n.*{n} questions"):
            check_whole(found, n)


@pytest.mark.parametrize("odd", [0, 2])
def test_answers_that_are_not_judged_alike(tmp_path: Path, odd: int) -> None:
    found = read(written(tmp_path / "results"), ChosenAnswer)
    records = {key: replace(one, per_byte=0) if i == odd else one for i, (key, one) in enumerate(found.records.items())}
    mixed = found._replace(records=records)
    for now, before in ((found, mixed), (mixed, found)):
        with pytest.raises(ConfigError, match="not all judged alike"):
            compare_results(now, before)
    alike = found._replace(records={key: replace(one, per_byte=0) for key, one in found.records.items()})
    with pytest.raises(ConfigError, match="of other questions"):
        compare_results(alike, found)
