"""What README and docs show works with the core dependencies alone, or names the extra that it needs."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.cli.main import COMMANDS
from tests.docs.test_commands import BELOW, of_pages, words
from tools.nightly.packages import BUILD, ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
README = (ROOT / "README.md").read_text()
STRUCTURED = (ROOT / "docs" / "structured-output.md").read_text()
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\$|://|^[AM]$|\.(jsonl|gguf|json|raw|engine)$|\.\.\.|results/")
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "find", "parameters": CITY}}
HELLO = [{"role": "user", "content": "Name a city."}]


class Plain:
    """A virtual environment with the core dependencies, and Millrace itself from this checkout."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.variables = {"PATH": f"{python.parent}{os.pathsep}/usr/bin:/bin", "HOME": str(folder), "NO_COLOR": "1"}

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
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    (command,) = re.findall(r"^    \.venv/bin/(millrace serve \S+)", README, re.MULTILINE)
    with subprocess.Popen([*command.split(), "--port", str(port)], cwd=plain.folder, env=plain.variables) as process:
        try:
            deadline = time.monotonic() + 300
            while not _is_ready(port):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


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


def complete() -> list[str]:
    """Commands of the pages that can run as they are: no placeholder, no file that an earlier one makes, no server."""
    lines = {line for _, line in of_pages() if line.startswith("millrace ")}
    lines = {shlex.join(words(line)) for line in lines if not any(PLACEHOLDER.search(word) for word in words(line)[2:])}
    return sorted(line for line in lines if len(line.split()) > 1 and line.split()[1] not in ("serve", "chat", "eval"))


def test_complete_commands_of_the_pages_run(plain: Plain) -> None:
    lines = complete()
    assert len(lines) > 5
    failed: list[str] = []
    for line in lines:
        ran = plain.run(*shlex.split(line))
        if ran.returncode and not re.search(r"usage:|Usage:|expected:|Missing|No GPU|no GPU", ran.stderr + ran.stdout):
            failed.append(f"{line}: {ran.stderr[-500:]}")
        assert "ModuleNotFoundError" not in ran.stderr, ran.stderr
    assert not failed, "\n".join(failed)


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
