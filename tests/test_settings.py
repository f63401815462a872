"""Settings: declared once, checked when made, and turned into options without saying anything twice."""

import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path

import click
import pytest

from millrace.cli.options import make_settings, settings_options
from millrace.cli.sampling_flags import SamplingFlags
from millrace.cli.serve.flags import ListenFlags, QueueFlags, ServeFlags
from millrace.compile.settings import BuildSettings
from millrace.errors import ConfigError
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.runtime.settings import RunSettings
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags
from millrace.settings import Settings, declared, flag_of, parse_size, plain_type, read_bounded, setting

CLASSES = (
    BuildSettings,
    RunSettings,
    SamplingFlags,
    QueueFlags,
    ListenFlags,
    ServeFlags,
    RestrictionFlags,
    OperationFlags,
)


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    number: int = setting(3, "how many", low=1, high=5)
    share: float | None = setting(None, "how much", low=0.0)
    kind: str = setting("a", "which", choices=("a", "b"))
    room: int | None = setting(None, "how large", size=True, low=1)
    several: tuple[str, ...] = setting((), "which ones")
    loud: bool = setting(False, "say it aloud")


def test_every_field_says_what_it_is_and_has_a_legal_default() -> None:
    for cls in CLASSES:
        cls()  # the defaults pass their own checks
        assert 0 < len(fields(cls)) <= 12, cls
        for f in fields(cls):
            said = declared(f)
            assert len(said.help) > 8 and not said.help.endswith("."), f"{cls.__name__}.{f.name}: {said.help!r}"
            assert plain_type(cls, f.name) in (int, float, str, bool, tuple)


def test_no_name_means_two_things() -> None:
    names = [f.name for cls in CLASSES for f in fields(cls)]
    assert len(names) == len(set(names)), "they meet as options of one command"


@pytest.mark.parametrize(
    "given, fragment",
    [
        ({"number": 0}, "--number is 0"),
        ({"number": 6}, "1 to 5"),
        ({"share": -0.5}, "at least 0"),
        ({"share": float("nan")}, "--share is nan"),
        ({"kind": "c"}, "one of a, b"),
        ({"room": "big"}, "512M or 2GiB"),
        ({"room": 0}, "--room is 0"),
        ({"loud": "off"}, "--loud is 'off'"),
        ({"loud": 0}, "True or False"),
    ],
)
def test_a_value_out_of_range_is_refused(given: dict[str, object], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Example(**given)  # type: ignore[arg-type]
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "text, nbytes",
    [("7", 7), ("1k", 1024), ("512M", 512 << 20), ("2GiB", 2 << 30), ("0.5g", 1 << 29), ("1 TB", 1 << 40), (12, 12)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text, "room") == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1M", "1X", "1e9", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--room is"):
        parse_size(text, "room")


def test_flags_are_named_like_fields() -> None:
    assert flag_of("kv_memory") == "--kv-memory"


def parsed(*arguments: str) -> Example:
    found = []

    @click.command()
    @settings_options(Example)
    def command(**given: object) -> None:
        found.append(make_settings(Example, given))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_options_come_from_the_fields() -> None:
    assert parsed() == Example()
    arguments = [
        "--number",
        "4",
        "--share",
        "0.5",
        "--kind",
        "b",
        "--room",
        "2G",
        "--several=x",
        "--several=y",
        "--loud",
    ]
    assert parsed(*arguments) == Example(number=4, share=0.5, kind="b", room=2 << 30, several=("x", "y"), loud=True)


def test_an_option_out_of_range_is_the_setting_s_own_error() -> None:
    with pytest.raises(ConfigError, match="--number is 9"):
        parsed("--number", "9")


def test_files_that_are_named_are_read_in_bounds(tmp_path: Path) -> None:
    """A pipe of a shell is read to its end."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert len(read_bounded(tmp_path / "file", 100)) == 100 and len(read_bounded(tmp_path / "file", 40)) == 41
    assert len(read_bounded(Path("/dev/zero"), 1 << 20)) == (1 << 20) + 1
    ours, theirs = os.pipe()

    def write() -> None:
        os.write(theirs, b"late")
        os.close(theirs)

    writer = threading.Timer(0.1, write)
    writer.start()
    assert read_bounded(Path(f"/dev/fd/{ours}"), 100) == b"late"
    writer.join()
    os.close(ours)


def test_a_silent_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.settings._PIPE_S", 0.05)
    ours, theirs = os.pipe()
    with pytest.raises(TimeoutError, match="nothing came out of the pipe"):
        read_bounded(Path(f"/dev/fd/{ours}"), 100)
    os.close(ours)
    os.close(theirs)
