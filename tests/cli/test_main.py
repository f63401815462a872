"""The command line as a whole: help, unknown words, exit codes."""

import contextlib
import io
import json
import os
import pty
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
def test_the_table_of_commands_says_what_each_says_itself(name: str) -> None:
    assert COMMANDS[name] == command(name).get_short_help_str(200)


def test_the_help_of_serve_has_a_section_for_each_concern(millrace: Millrace) -> None:
    lines = millrace("serve", "--help").out.splitlines()
    titles = [line.removesuffix(":") for line in lines if line and line[0] not in " #" and line.endswith(":")]
    assert titles == ["Network", "Server", "Scheduling", "Model repository (Triton)", "Build", "Engine", "Other"]
    flags = [flag for p in command("serve").params if isinstance(p, click.Option) for flag in p.opts]
    assert all(any(flag in line.split() for line in lines) for flag in flags if len(flag) > 2)


@pytest.mark.parametrize(("given", "meant"), [
    (["serve", "--max_model_len", "3"], "did you mean --max-context?"),
    (["serve", "--max_batch_size", "3"], "did you mean --max-batch?"),
    (["serve", "--kv_cache_free_gpu_memory_fraction", "0.9"], "did you mean --kv-memory?"),
    (["serve", "--tool-call-parser", "hermes"], "not needed: the chat template shows"),
    (["serve", "--trust-remote-code"], "not needed: no code of a checkpoint"),
    (["serve", "--no-enable-prefix-caching"], "did you mean --no-prefix-cache?"),
    (["genai-perf"], 'did you mean "bench"?'), (["trtllm-build"], 'did you mean "build"?'), (["ps"], '"list"'),
])  # fmt: skip
def test_words_of_other_programs_get_a_hint(millrace: Millrace, given: list[str], meant: str) -> None:
    millrace(*given).assert_mistake(meant)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_json_and_help_for_each_option(millrace: Millrace, name: str) -> None:
    result = millrace(name, "--help")
    assert result.code == 0
    assert "Example" in result.out and f"millrace {name}" in result.out
    options = [p for p in command(name).params if isinstance(p, click.Option)]
    assert "--json" in [flag for o in options for flag in o.opts]
    assert all(o.help for o in options), [o.name for o in options if not o.help]


def test_help_is_a_command_too(millrace: Millrace) -> None:
    assert millrace("help").out == millrace("--help").out
    assert millrace("help", "serve").out == millrace("serve", "--help").out


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_they_are_not_wanted(cache: Path, variables: dict[str, str]) -> None:
    """https://no-color.org; a dumb terminal shows escape sequences as rubbish."""
    for arguments in (["doctor", "--help"], ["sreve"], ["list"]):
        assert "\x1b" not in in_a_terminal(arguments, cache, variables)
    assert "\x1b[31m" in in_a_terminal(["sreve"], cache, {"TERM": "xterm", "NO_COLOR": ""}), "where they are, there are"


def in_a_terminal(arguments: list[str], cache: Path, variables: dict[str, str]) -> str:
    """All that a command shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    settings = {**environment(cache), "TERM": "xterm", **variables}
    command = [sys.executable, "-m", "millrace", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    return shown.decode()


def test_a_terminal_without_the_characters_shows_others(cache: Path) -> None:
    """A Latin-1 locale and a name that it cannot spell: question marks, and no traceback."""
    settings = {**environment(cache), "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "millrace", "inspect", "\u732b/\u732b/\u732b"]
    told = subprocess.run(command, env=settings, capture_output=True)
    assert told.returncode == 2 and b"?/?/?" in told.stderr and b"Traceback" not in told.stderr


def test_version(millrace: Millrace) -> None:
    assert millrace("--version").out == f"millrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["sreve", "tiny"], ['no command "sreve"', 'did you mean "serve"?']),
        (["xyzzy"], ["one of: bench, build, chat"]),
        (["--verbos"], ["no option --verbos"]),
        (["serve", "tiny", "--prot", "80"], ["no option --prot", 'did you mean "--port"?']),
        (["serve", "tiny", "--max-model-len", "512"], ["did you mean --max-context?"]),
        (["generate", "tiny", "Once", "--dtype", "half"], ["did you mean --precision?"]),
        (["serve", "-m", "tiny"], ["did you mean MODEL?"]),
        (["serve", "tiny", "--gpu-memory-utilization", "0.9"], ["did you mean --kv-memory?"]),
        (["serve", "tiny", "--tensor-parallel-size", "2"], ["expected: not supported: a model runs on one device"]),
        (["serve", "tiny", "--enforce-eager"], ["expected: not needed: decode steps on a GPU"]),
        (["generate", "tiny", "x", "--device", "CUDA:1"], ['--device is "CUDA:1"', "write --device cuda:1"]),
        (["serve", "--model-store", "m"], ["did you mean --model-repository?"]),
        (["serve", "--http-port", "80"], ["did you mean --port?"]),
        (["serve", "--log-verbose=1"], ["did you mean --log-level?"]),
        (
            ["serve", "--exit-on-error=false"],
            ["expected: not needed: a mistake in a repository ends it", "leave it out"],
        ),
        (["generate", "tiny", "--exit-on-error"], ["no option --exit-on-error", "an option of this command"]),
        (["serve", "--allow-client-shm=true", "--model-repository", "/none"], ["/none is no folder"]),
        (["serve"], ["there is nothing to serve", "MODEL, --model-repository DIR, or both"]),
        (["generate", "tiny"], ["there is no prompt", "millrace generate MODEL PROMPT"]),
        (["generate", "tiny", "Once", "-p", "Once"], ["the prompt is given twice"]),
        (
            ["generate", "tiny", "-p", "x", "--precision", "fp16"],
            ['"fp16" is unknown', "fp32 runs a float16 checkpoint"],
        ),
        (["generate", "tiny", "-p", "x", "--precision", "INT8"], ["use w8a8"]),
        (["generate", "tiny", "-p", "x", "--max-tokens", "many"], ["'many' is not a valid integer"]),
        (["generate", "tiny", "x", "extra"], ["unexpected extra argument"]),
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


def test_summaries_are_whole(millrace: Millrace) -> None:
    shown = millrace("--help").out.split("Commands:")[1].splitlines()[1:]
    summaries = [line.split(maxsplit=1)[1] for line in shown if line.strip()]
    assert len(summaries) == len(COMMANDS)
    assert all(len(s) <= 60 and s.endswith(".") and not s.endswith("...") for s in summaries), summaries


@pytest.mark.parametrize(
    ("word", "meant"),
    [("run", "millrace chat MODEL"), ("ps", '"list"'), ("stop", "Ctrl-C"), ("show", '"inspect"'), ("ls", '"list"'),
     ("sevre", 'did you mean "serve"?')],
)  # fmt: skip
def test_commands_of_other_programs_are_translated(millrace: Millrace, word: str, meant: str) -> None:
    millrace(word, "tiny").assert_mistake(f'there is no command "{word}"', meant)


def test_an_argument_that_is_not_utf8(cache: Path, tmp_path: Path) -> None:
    latin = os.fsdecode(b"caf\xe9")
    result = run_process(["generate", "tiny", "ab " + latin], cache)
    result.assert_mistake("argument 3 is not UTF-8: byte 0xe9 at 6", "iconv")
    assert "surrogate" not in result.err and not cache.exists(), "before anything is built"
    run_process(["generate", "tiny", "x" * 5000 + latin], cache).assert_mistake("byte 0xe9 at 5003")
    run_process(["generate", latin, "Once"], cache).assert_mistake("argument 2 is not UTF-8: byte 0xe9 at 3")
    folder = tmp_path / latin  # a name of a file may be any bytes
    folder.mkdir()
    run_process(["generate", str(folder), "Once"], cache).assert_mistake("config.json")
