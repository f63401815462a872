"""What README and docs show works with the core dependencies alone, or names the extra that it needs."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.cli.main import COMMANDS
from tests.docs.test_commands import BELOW, of_pages, words
from tests.support.page_files import ENGINES, REQUEST, write_page_files
from tools.nightly.packages import BUILD, ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
README = (ROOT / "README.md").read_text()
STRUCTURED = (ROOT / "docs" / "structured-output.md").read_text()
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "find", "parameters": CITY}}
HELLO = [{"role": "user", "content": "Name a city."}]


@dataclass(frozen=True)
class Plain:
    """A virtual environment with the core dependencies, and Millrace itself from this checkout."""

    python: Path
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        path = f"{self.python.parent}{os.pathsep}/usr/bin:/bin"
        return {"PATH": path, "HOME": str(self.python.parents[1]), "NO_COLOR": "1"}

    def run(self, *command: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=timeout_s
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    BUILD.mkdir(exist_ok=True)
    python = environment(BUILD / "plain", project["dependencies"])
    (site,) = (BUILD / "plain" / "lib").glob("python*/site-packages")
    (site / "millrace.pth").write_text(f"{ROOT / 'src'}\n")
    ours = Path(str(distribution("millrace").locate_file("")))  # as an editable installation leaves it
    (described,) = ours.glob("millrace-*.dist-info")
    for name in (described.name, "millrace"):
        link = site / name
        link.unlink(missing_ok=True)
        link.symlink_to(ours / name)
    script = python.parent / "millrace"
    script.write_text(f"#!{python}\nimport sys\nfrom millrace.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    absent = Plain(python, tmp_path_factory.mktemp("plain"))
    assert absent.run("python", "-c", "import grpc").returncode, "an extra's package is not there"
    return absent


@pytest.fixture(scope="module")
def server(plain: Plain) -> Iterator[str]:
    (command,) = re.findall(r"^    \.venv/bin/(millrace serve \S+)", README, re.MULTILINE)
    with serving(plain, command.split()[2:]) as url:
        yield url


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readmes_questions_are_answered(plain: Plain, server: str) -> None:
    for block in blocks(README, "bash"):
        ran = plain.run("bash", "-c", block.replace("http://127.0.0.1:8000", server))
        assert ran.returncode == 0 and json.loads(ran.stdout)["choices"], ran.stderr
    asked, *_ = blocks(README, "python")
    ran = subprocess.run(
        [sys.executable, "-c", asked.replace("http://127.0.0.1:8000", server)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


@pytest.mark.parametrize("block", [blocks(README, "python")[1], *blocks(STRUCTURED, "python")], ids=["README", "form"])
def test_python_of_the_pages_runs(plain: Plain, block: str) -> None:
    ran = plain.run("python", "-c", block)
    assert ran.returncode == 0, ran.stderr


FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
    {"response_format": {"type": "json_object"}}, {"guided_json": CITY}, {"guided_regex": "[a-z]+"},
    {"guided_choice": ["Ulm", "Bonn"]}, {"guided_grammar": 'root ::= "Ulm" | "Bonn"'},
    {"structured_outputs": {"json": CITY}}, {"tools": [TOOL], "tool_choice": "required"},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_structured_output_and_forced_calls_work(server: str, fields: dict[str, Any]) -> None:
    reply = httpx.post(
        f"{server}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 60, **fields}, timeout=60
    )
    assert reply.status_code == 200, reply.text


@dataclass(frozen=True)
class Prepared:
    """files: what commands find under the names that the pages use. url: of a server that knows every model name"""

    plain: Plain
    files: Path
    url: str

    def run(self, folder: Path, line: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of the pages in a folder that has all files but those that it writes."""
        cut = next((more for begin, more in CUT.items() if line.startswith(begin)), "")
        command = [*self.command(line), *cut.split()]
        self.fill(folder, command)
        return subprocess.run(
            command, cwd=folder, env=self.plain.variables, capture_output=True, text=True, timeout=900, **more
        )

    def fill(self, folder: Path, command: Sequence[str]) -> None:
        writes = () if "--measure" in command else WRITES
        if "--samples-from" in command:  # statistics of this text are collected anew
            writes = (*writes, "--statistics")
        written = {value.rstrip("/") for flag, value in pairwise(command) if flag in writes}
        for file in self.files.iterdir():
            if file.name not in written and not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)

    def command(self, line: str) -> list[str]:
        """Put names of what there is in the place of the pages' placeholders."""
        names = PLACEHOLDERS | dict.fromkeys(("URL", "A", "B", "http://old:8000", "http://new:8000"), self.url)
        found = [names.get(word, word) for word in shlex.split(line)]
        return [re.sub(r"^http://127\.0\.0\.1:(8000|\$\w+)$", self.url, word) for word in found]


def _build_network_of_page(folder: Path) -> None:
    """Run small_cnn.py as docs/extending/network.md has it, which needs PyTorch."""
    page = (ROOT / "docs" / "extending" / "network.md").read_text()
    script = page.partition("`small_cnn.py`")[2].partition("```python\n")[2].partition("```")[0]
    (folder / "small_cnn.py").write_text(script)
    ran = subprocess.run([sys.executable, "small_cnn.py"], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0 and "largest difference" in ran.stdout, ran.stderr


@pytest.fixture(scope="module")
def prepared(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    files = tmp_path_factory.mktemp("pages")
    write_page_files(files, (ROOT / "docs" / "repository.md").read_text())
    (files / "examples").symlink_to(ROOT / "examples")
    _build_network_of_page(files)
    made = replace(plain, folder=files)
    for command in (
        "millrace build tiny -o model.engine --tune 0 --no-evaluate",
        "millrace compress tiny -o small --recipe int4-wo-mse --no-evaluate",
        "millrace compress tiny -o tiny-int4-wo --recipe int4-wo --no-evaluate",
        *(f"millrace compress {model} -o from-{of} {GPTQ} --statistics {of}" for model, of in STATISTICS.items()),
        "millrace eval tiny --data mmlu --out results-of-bf16.jsonl",
        "millrace size verify tiny -o profile.json --rounds 1 --each-s 1 --probe-s 0.5 --loads 0.5",
    ):
        ran = made.run(*command.split())
        assert ran.returncode in (0, VERDICT), f"{command}: {ran.stderr}"
    for name in ENGINES:
        if name != "model":
            (files / f"{name}.engine").symlink_to(files / "model.engine")
    with serving(made, ["tiny", "--served-model-name", "*", "--model-repository", "served"]) as url:
        (files / "response.json").write_text(httpx.post(f"{url}/v1/chat/completions", json=REQUEST, timeout=60).text)
        for name in ("old-results", "new-results"):
            load = f"--model tiny --request-count 4 --isl 20 --osl 4 --certify-s 0 -o {name}"
            ran = made.run("millrace", "bench", url, *load.split())
            assert ran.returncode == 0, ran.stderr
        yield Prepared(plain, files, url)


@contextmanager
def serving(plain: Plain, arguments: Sequence[str]) -> Iterator[str]:
    """Run `millrace serve` until its end; gives its URL once it is ready. raises AssertionError if it fails"""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    command = ["millrace", "serve", *arguments, "--port", str(port)]
    with (
        tempfile.TemporaryFile("w+") as log,  # a pipe that nobody reads would stop the server when it is full
        subprocess.Popen(command, cwd=plain.folder, env=plain.variables, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 300
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise AssertionError(f"{shlex.join(command)} is not ready: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


PLACEHOLDERS = {
    "MODEL": "tiny", "$MODEL": "tiny", "M": "tiny", "ENGINE": "model.engine", "DIR": "models", "$MMLU": "mmlu",
    "FOLDER": "small", "FILE": "prompts.jsonl",
}  # fmt: skip
WRITES = ("-o", "--output", "--record", "--out")
ALONE = {"demo", "doctor", "help", "list"}  # commands that need no argument
_PART = "a flag that a sentence names, without what the command needs"
_GPU = "it needs a GPU"
# Commands that are not run, and why.
NOT_RUN = {
    "millrace bench -o": _PART, "millrace build --traffic FILE": _PART, "millrace compress --recipe fp8": _PART,
    "millrace serve --model-repository": _PART, "millrace serve --record": _PART, "millrace serve --record FILE": _PART,
    "millrace serve ./llama-3.1-8b --precision fp8 --kv-cache-dtype fp8 --device cuda": _GPU,
    "millrace build MODEL -o ENGINE --device H100": _GPU,
    "millrace serve --model-repository examples/answers/models": "test_answers.py puts the models there, and runs it",
    "millrace serve --model-repository examples/ocr/models": "test_ocr.py puts the models there, and runs it",
    "millrace convert old-model -o new-model": "it needs a checkpoint with weights of PyTorch",
    "millrace serve new-model": "it needs the one that `millrace convert` writes",
    "millrace eval MODEL": "a sentence names it without --data, which MMLU needs",
    "millrace size fit RESULT... --model M --hardware H100 --precision fp8": "it needs results of a server on that GPU",
    "millrace size verify MODEL": "the fixture runs it, for a profile that others read",
}  # fmt: skip
# What a command has that needs an extra, which its page names.
NEEDS_EXTRA = {
    "--png": "png", "--grpc-port": "grpc", "--protocol grpc": "grpc", "mode=opentelemetry": "otel",
    "millrace doctor --device cuda": "gpu", "--model-impl transformers": "torch",
}  # fmt: skip
# What keeps a command short: added to those of the pages, and said again it goes before what they say.
# The first beginning of a line that fits is taken.
CUT = {
    "millrace compress '$MODEL' -o advice": "--presets fp8-gptq",
    "millrace compress SmolLM2-135M-Instruct.Q4_1.gguf -o advice": "--presets fp8-gptq",
    "millrace size verify": "--rounds 1 --each-s 1 --probe-s 0.5 --loads 0.5",
    "millrace bench sweep": "--most 2 --duration-s 1", "millrace bench compare --engine": "--rounds 3",
    "millrace bench compare http": "--rounds 3 --request-count 4",
    "millrace bench compare A B": "--rounds 3 --request-count 4", "millrace bench infer": "--duration-s 0.2",
    "millrace bench http://127.0.0.1:8000": "--duration-s 1",
    "millrace bench http": "--request-count 8", "millrace bench --engine": "--request-count 8",
}  # fmt: skip
GPTQ = "--recipe int4-gptq --samples-from text.txt --no-evaluate"
STATISTICS = {"tinyllama-1.1b": "stats", "SmolLM2-135M-Instruct.Q4_1.gguf": "smollm2-stats"}  # of a model, by folder
VERDICT = 3  # the exit code of a command that ran, and judged what it measured


def extra_of(line: str) -> str | None:
    return next((extra for part, extra in NEEDS_EXTRA.items() if part in line and line not in NOT_RUN), None)


def named_commands() -> list[str]:
    """Commands of the pages, each once; without those that are no more than a name, whose --help another test asks."""
    lines = {shlex.join(words(line)) for _, line in of_pages() if line.startswith("millrace ")}
    names = {*COMMANDS, *(word for below in BELOW for word in below)}
    return sorted(one for one in lines if not names.issuperset(one.split()[1:]) or one.split()[1] in ALONE)


def test_each_command_of_the_pages_is_run_or_has_a_reason() -> None:
    lines = named_commands()
    assert len(lines) > 60, "pages have commands, and they are found"
    assert not [one for one in NOT_RUN if one not in lines], "it is in no page any more"
    assert not [one for one in (*CUT, *NEEDS_EXTRA) if not any(one in line for line in lines)], "it is in no page"
    assert len(NOT_RUN) + sum(extra_of(line) is not None for line in lines) < len(lines) / 3


@pytest.mark.parametrize(
    "line", [one for one in named_commands() if one not in NOT_RUN and extra_of(one) is None], ids=str
)
def test_a_command_of_the_pages_runs(prepared: Prepared, tmp_path: Path, line: str) -> None:
    """It ends with success; one that serves answers a request, and a chat answers what is on stdin."""
    if line.startswith("millrace serve "):
        command = prepared.command(line)
        prepared.fill(tmp_path, command)
        with serving(replace(prepared.plain, folder=tmp_path), command[2:]) as url:
            if _has_model(command):
                asked = {"prompt": "Once", "max_tokens": 2}
                reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            else:
                reply = httpx.post(f"{url}/v2/repository/index", json={}, timeout=60)
                assert all(model["state"] == "READY" for model in reply.json()) and reply.json(), reply.text
            assert reply.status_code == 200, reply.text
        return
    ran = prepared.run(tmp_path, line, input="Tell me a story.\n" if line.startswith("millrace chat ") else "")
    assert ran.returncode in (0, VERDICT), f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert ran.stdout or ran.stderr


def _has_model(command: Sequence[str]) -> bool:
    return not command[2].startswith("-")


@pytest.mark.parametrize("line", [one for one in named_commands() if extra_of(one) is not None])
def test_a_command_that_needs_an_extra_names_it(prepared: Prepared, tmp_path: Path, line: str) -> None:
    """The command fails here, and says which extra it needs; so does every page that has it."""
    ran = prepared.run(tmp_path, line)
    extra = f"millrace[{extra_of(line)}]"
    assert ran.returncode and extra in ran.stderr, ran.stderr
    pages = {page for page, one in of_pages() if one.startswith("millrace ") and shlex.join(words(one)) == line}
    assert pages and all(extra in (ROOT / page).read_text() for page in pages), pages


@pytest.mark.parametrize("name", sorted([*COMMANDS, *(" ".join(below) for below in BELOW)]))
def test_every_command_starts(plain: Plain, name: str) -> None:
    ran = plain.run("millrace", *name.split(), "--help")
    assert ran.returncode == 0 and ran.stdout, ran.stderr


NEEDS = [
    ("millrace serve --model-repository models --grpc-port 8001", "grpc"),
    ("millrace generate tiny -p Once --device cuda", "gpu"),
    ("millrace bench --engine tiny --isl 8 --osl 8 --request-count 1 --png -o results", "png"),
    ("millrace serve --model-repository models --trace-config mode=opentelemetry", "otel"),
]


@pytest.mark.parametrize("line, extra", NEEDS, ids=[extra for _, extra in NEEDS])
def test_a_missing_extra_is_named(plain: Plain, line: str, extra: str) -> None:
    (plain.folder / "models").mkdir(exist_ok=True)
    ran = plain.run(*line.split())
    assert ran.returncode == 2 and f"millrace[{extra}]" in ran.stderr, ran.stderr
