"""`serve --config FILE`: flags from YAML, and every way in which the file can be wrong."""

from pathlib import Path
from typing import Any

import click
import pytest

from millrace.cli.config_file import read_config_file
from millrace.cli.main import cli
from millrace.errors import ConfigError
from tests.cli.conftest import Millrace


def serve() -> click.Command:
    found = cli.get_command(click.Context(cli), "serve")
    assert found is not None
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters that `serve` would get."""
    with serve().make_context("serve", list(arguments)) as ctx:
        return ctx.params


def write(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


def test_the_file_gives_flags_and_the_model(tmp_path: Path) -> None:
    file = write(tmp_path, """
        model: tiny
        port: 9000
        kv-memory: 512M
        kv_cache_dtype: int8
        prefix-cache: false
        itl-ms: 50.5
        cors-origin: ["https://a.example", "https://b.example"]
        trace-config: mode=opentelemetry
        api-key-file: null
    """)  # fmt: skip
    found = parsed(["--config", file])
    assert (found["model"], found["port"], found["kv_memory"], found["kv_cache_dtype"]) == (
        "tiny",
        9000,
        "512M",
        "int8",
    )
    assert found["prefix_cache"] is False and found["itl_ms"] == 50.5 and found["api_key_file"] is None
    assert found["cors_origin"] == ("https://a.example", "https://b.example")
    assert found["trace_config"] == ("mode=opentelemetry",)


def test_the_command_line_goes_first_and_the_rest_has_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "model: other\nport: 9000\nno-prefix-cache: true\n")
    found = parsed(["tiny", "--port", "9001", "--config", file])
    assert (found["model"], found["port"], found["prefix_cache"], found["host"]) == ("tiny", 9001, False, "127.0.0.1")
    assert parsed(["--config", write(tmp_path, "")])["port"] == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 9000", ["prot", 'did you mean "--port"?']),
        (
            "tensor-parallel-size: 2",
            ["config.yaml:1: ", "tensor-parallel-size", "not supported: a model runs on one device"],
        ),
        ("tensor-parallel-size: 1", ["leave it out: a model runs on one device", "to fix:   leave it out"]),
        ("generation-config: auto", ["leave it out: "]),
        ("port: abc", ["config.yaml:1: port is 'abc'", "a whole number"]),
        ("\n\nitl-ms: fast", ["config.yaml:3: itl-ms is 'fast'", "a number"]),
        ("port: 99999", ["config.yaml:1: --port is 99999", "0 to 65535"]),
        ("kv-memory: lots", ["config.yaml:1: --kv-memory is", "512M"]),
        ("schedule: lifo", ["config.yaml:1: --schedule is", "fcfs"]),
        ("host: a\nport: 2024-99-99", ["config.yaml:2: port: "]),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ["3 mistakes", "line 1", "line 3"]),
        ("port: 'x", ["config.yaml:1:", "not valid YAML: while scanning a quoted scalar found unexpected end"]),
        ("max-model-len: 4096", ["max-model-len", "did you mean --max-context?"]),
        ("port: 9000\nport: 9001", ["config.yaml:2: port sets --port again, which line 1 sets", "twice"]),
        ("max-batch: 4\nmax_batch: 5", ["max_batch", "again"]),
        ("port: [1, 2]", ["port", "a text or a number"]),
        ("port: {a: 1}", ["port", "a text or a number"]),
        ("prefix-cache: 1", ["prefix-cache", "true or false"]),
        ("host: true", ["host", "a text or a number"]),
        ("- port\n- 9000", ["holds a list", "one flag a line"]),
        ("port: [", ["not valid YAML"]),
        ("model: !!python/object/apply:os.system ['true']", ["not valid YAML"]),
        ("config: other.yaml", ["config"]),
        ("help: true", ["help"]),
        ("? [1, 2]\n: 3", ["[1, 2]"]),
        ("[" * 5000, ["not valid YAML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_config_file(Path(write(tmp_path, text)), serve())
    assert all(word in str(error.value) for word in words), str(error.value)


def test_all_mistakes_are_listed_with_their_lines(tmp_path: Path) -> None:
    text = (
        "model: tiny\ntensor-parallel-size: 1\nprot: 80\nport: many\n# -\nmax-batch: 4\nmax-batch: 5\nprefix-cache: 1\n"
    )
    with pytest.raises(ConfigError) as error:
        read_config_file(Path(write(tmp_path, text)), serve())
    assert "config.yaml has 5 mistakes: line 2: there is no flag" in error.value.what
    assert all(f"line {n}: " in part for n in (2, 3, 4, 7, 8) for part in error.value.args)
    assert "line 1:" not in str(error.value) and "line 6:" not in str(error.value)
    with pytest.raises(ConfigError, match=r"30 mistakes: .*; and 20 more"):
        read_config_file(Path(write(tmp_path, "".join(f"k{n}: 1\n" for n in range(30)))), serve())


def test_errors_of_the_parser_are_one_line(tmp_path: Path) -> None:
    for text in ("a: b: c", "a: [1", "\tx", "a: *b", "a: \x00"):
        with pytest.raises(ConfigError) as error:
            read_config_file(Path(write(tmp_path, text)), serve())
        assert "\\n" not in str(error.value) and "unicode string" not in str(error.value), str(error.value)


def test_values_are_checked_as_on_the_command_line(millrace: Millrace, tmp_path: Path) -> None:
    millrace("serve", "--config", write(tmp_path, "model: tiny\nport: 99999")).assert_mistake("--port is 99999")
    millrace("serve", "--config", write(tmp_path, "port: many")).assert_mistake("many")
    millrace("serve", "--config", tmp_path / "none.yaml").assert_mistake("none.yaml cannot be read")
    big = tmp_path / "big.yaml"
    big.write_text("#" * (1 << 20) + "\nport: 1")
    millrace("serve", "--config", big).assert_mistake("more than 1048576 bytes")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    millrace("serve", "--config", tmp_path / "binary.yaml").assert_mistake("not valid YAML")
