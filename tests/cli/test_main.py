"""The command line as a whole: help, unknown words, exit codes."""

import io
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from millrace import __version__
from millrace.cli.main import COMMANDS, cli
from tests.cli.conftest import Millrace
from tests.support.command_line import environment, interrupted, run_process


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(millrace: Millrace, arguments: list[str]) -> None:
    result = millrace(*arguments)
    assert result.code == 0
    assert all(f"\n  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_json_and_help_for_each_option(millrace: Millrace, name: str) -> None:
    result = millrace(name, "--help")
    assert result.code == 0
    assert "Example" in result.out and f"millrace {name}" in result.out
    options = [p for p in command(name).params if isinstance(p, click.Option)]
    assert "--json" in [flag for o in options for flag in o.opts]
    assert all(o.help for o in options), [o.name for o in options if not o.help]


def test_version(millrace: Millrace) -> None:
    assert millrace("--version").out == f"millrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["sreve", "tiny"], ['no command "sreve"', 'did you mean "serve"?']),
        (["xyzzy"], ["one of: build, chat"]),
        (["--verbos"], ["no option --verbos"]),
        (["serve", "tiny", "--prot", "80"], ["no option --prot", 'did you mean "--port"?']),
        (["serve"], ["Missing argument 'MODEL'", "millrace serve --help"]),
        (["generate", "tiny"], ["Missing option '-p'"]),
        (["generate", "tiny", "-p", "x", "--max-tokens", "many"], ["'many' is not a valid integer"]),
        (["generate", "tiny", "-p", "x", "extra"], ["unexpected extra argument"]),
        (["rm"], ["Missing argument"]),
    ],
)
def test_a_wrong_command_line_is_explained(millrace: Millrace, arguments: list[str], fragments: list[str]) -> None:
    millrace(*arguments).assert_mistake(*fragments)


def test_a_bad_environment_stops_the_start(millrace: Millrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "maybe")
    millrace("list").assert_mistake("HF_HUB_OFFLINE is 'maybe'", "1 or 0")


def test_python_dash_m_and_exit_code(cache: Path) -> None:
    run_process(["sreve"], cache).assert_mistake('did you mean "serve"?')


def test_ctrl_c_gives_130_and_no_traceback(built_tiny: Path, cache: Path) -> None:
    arguments = ["generate", str(built_tiny), "-p", "Once", "--max-tokens", "2000", "--temperature", "0"]
    result = interrupted([*arguments, "--seed", "1"], cache, after=b" ")
    assert result.code == 130, result.err
    assert "Traceback" not in result.err


def test_a_reader_that_goes_away_is_no_error(built_tiny: Path, cache: Path) -> None:
    arguments = ["generate", str(built_tiny), "-p", "Once", "--max-tokens", "400", "--temperature", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(cache),
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read().strip() == b""


def test_text_on_stdin_that_is_not_utf8(millrace: Millrace, built_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    millrace("generate", built_tiny, "-p", "-").assert_mistake("byte 0xff at 3", "UTF-8")


def test_results_go_to_stdout_and_the_rest_to_stderr(millrace: Millrace, built_tiny: Path) -> None:
    result = millrace("generate", built_tiny, "-p", "Once", "--max-tokens", "4", "--json")
    assert result.err == "" and json.loads(result.out)["seed"]
