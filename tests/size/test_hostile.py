"""What somebody else wrote, named to sizing: refused with one message, and soon. What is written is whole."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.html_output import write_page
from millrace.errors import CheckpointError, ConfigError
from millrace.runtime.scheduling.step_cost_model import read_profile
from millrace.size import plan
from millrace.size.fit.overhead_file import FittedStack, read_stack, write_stack
from millrace.size.fit.user_runs import read_result
from millrace.size.money.prices import read_prices
from millrace.size.performance.fitted_devices import STACKS
from millrace.size.performance.measured_points import read_points, write_points
from millrace.size.performance.models import find_model
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits
from millrace.size.question.question import SizingQuestion, read_answers
from millrace.tune.recorded_requests import read_recording

HEAD = b"model,gpu,precision,tp,isl,osl,concurrency,ttft_ms,itl_ms,e2e_ms,req_s\n"
READERS: dict[str, Callable[[Path], object]] = {
    "answers": read_answers, "trace": read_recording, "measured": read_points, "prices": read_prices,
    "stack": read_stack, "profile": read_profile, "model": lambda path: find_model(str(path)),
    "result": read_result,
}  # fmt: skip
FILES = {
    "nothing": b"", "zeros": bytes(1000), "other encoding": "a: b\n".encode("utf-32"),
    "half a letter": b"a: caf\xe9",
    "deep": b"[" * 5_000, "deep names": b'{"a":' * 50_000, "many digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "deep lines": "\n".join(" " * i + "a:" for i in range(2000)).encode(), "a list": b"[1, 2]",
    "no number": b'{"version": NaN, "schema": NaN, "hidden_size": NaN}',
    "twice": b'{"hidden_size": 64, "hidden_size": 1}',
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [*FILES, "/dev/zero", "a folder", "a link to itself", "nowhere"])
def test_no_such_file_is_taken(tmp_path: Path, reader: str, name: str) -> None:
    file = tmp_path / "config.json"
    if name in FILES:
        file.write_bytes(FILES[name])
    elif name == "a link to itself":
        file.symlink_to(file)
    elif name == "a folder":
        file.mkdir()
    elif name == "/dev/zero":
        file.symlink_to(name)
    with pytest.raises((CheckpointError, ConfigError)) as found:
        READERS[reader](file)
    assert "None" not in str(found.value), "why it cannot be read"


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_that_nobody_writes_into(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an end at once, as there is no writer; a trace is gone through twice, and takes none."""
    os.mkfifo(tmp_path / "config.json")
    begun_s = time.monotonic()
    with pytest.raises(ConfigError):
        READERS[reader](tmp_path / "config.json")
    assert time.monotonic() - begun_s < 5


def test_a_writer_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.settings._PIPE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(ConfigError, match=r"cannot be read: nothing came out of the pipe for 0.05 s"):
            read_answers(tmp_path / "pipe")
    finally:
        os.close(writer)


@pytest.mark.parametrize("text, said", [
    ("rate: " + "1:" * 4000 + "1", "rate is a number of"),
    ("rate: .inf", "--rate is inf"), ("rate: -.inf", "--rate is -inf"),
    ("rate: " + "9" * 4000, "rate is a number of"), ("rate: !!binary aaaa", "a number"),
    ('model: "\\e[2J"', "can be shown"), ('hardware: ["\\e[2J"]', "names, at most"), ("model: 2020-01-01", "a text"),
    ('hardware: !!omap [a: 1]', "names, at most"), ("? !!timestamp 2020-99-99\n: a", "is no YAML"),
])  # fmt: skip
def test_answers_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "question.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as found:
        SizingQuestion.from_answers(read_answers(file))
    assert said in str(found.value) and str(found.value).replace("\n", "").isprintable()


def test_names_of_a_table_are_shown_and_steer_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    for row in (b"\x1b[2J,H100,fp8,1,100,10,1,1,1,10,100", b",H100,fp8,1,100,10,1,1,1,10,100"):
        file.write_bytes(HEAD + row + b"\n")
        with pytest.raises(ConfigError, match="line 2: model is"):
            read_points(file)


@pytest.mark.parametrize("text", ["years = 1e-300", "years = 1e-12", "pue = 1e12"])
def test_prices_do_not_become_endless(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(f"date = 2026-11-01\n[buy]\n{text}\nsystems = {{ H100 = 1e12 }}\n")
    with pytest.raises(ConfigError, match=r"years from 0\.01 to 1e\+12, a PUE from 1 to 100"):
        read_prices(file)


@contextmanager
def small_disk(max_bytes: int) -> Iterator[None]:
    """Files end there, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_meanwhile_leaves_what_was_there(tmp_path: Path) -> None:
    stack = FittedStack("H100 SXM", "fp8", next(iter(STACKS.values()))[0], 0.05)
    waits = Waits(0.1, 0.01, 1.0)
    points = [OperatingPoint(model="a" * 100, device="H100", precision="fp8", tp=1, input_tokens=1, output_tokens=9,
                    concurrency=1, rate=1.0, mean=waits, p95=None, source=FigureSource.MEASURED)]  # fmt: skip
    page = "<!doctype html>\n<!-- millrace report -->\n" + "x" * 4096
    written: list[tuple[Path, Callable[[Path], Any]]] = [
        (tmp_path / "stack.json", lambda file: write_stack(file, stack)),
        (tmp_path / "runs.csv", lambda file: write_points(file, points)),
        (tmp_path / "page.html", lambda file: write_page(file, page)),
    ]
    for file, write in written:
        with small_disk(64), pytest.raises((OSError, ConfigError), match=r"too large|File"):
            write(file)
        assert not list(tmp_path.iterdir()), "neither it, nor a part of it"
    for file, write in written[:2]:
        write(file)
        before = file.read_bytes()
        with small_disk(64), pytest.raises(OSError):
            write(file)
        assert file.read_bytes() == before
    assert read_stack(tmp_path / "stack.json") == stack


def test_a_device_is_written_into_and_stays_one() -> None:
    write_stack(Path("/dev/null"), FittedStack("H100 SXM", "fp8", next(iter(STACKS.values()))[0], 0.05))
    assert Path("/dev/null").is_char_device()


def test_a_name_that_no_file_can_have() -> None:
    for name in ("a" * 5000, "a\x00b"):
        with pytest.raises(ConfigError, match=r"no model is known|a line that can be shown"):
            plan(model=name, isl=10, osl=10, rate=1, mode="offline")
