"""Starting is quick (timing: the best of three), and imports nothing that is not needed."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.bench.client.demo_client import DemoChatRequest, ask
from millrace.bench.run.server_process import ServerProcess
from tests.support.command_line import environment

FORBIDDEN = "torch transformers huggingface_hub rich scipy pandas"


def best_of_three(arguments: Sequence[str], cache: Path) -> float:
    """Seconds of the fastest of three runs."""
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, env=environment(cache), capture_output=True)
        times.append(time.perf_counter() - start_s)
    return min(times)


def modules_after(code: str, cache: Path) -> set[str]:
    """Top-level modules that a fresh process has imported after running `code`."""
    code += "\nimport sys; sys.stderr.write(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment(cache), capture_output=True)
    return set(done.stderr.decode().splitlines()[-1].split())


@pytest.mark.timing
def test_import_takes_next_to_no_time(cache: Path) -> None:
    spent_s = best_of_three(["-X", "importtime", "-c", "import millrace"], cache)
    assert spent_s < 0.2, f"import millrace took {spent_s:.2f} s"


def test_import_loads_next_to_nothing(cache: Path) -> None:
    assert not modules_after("import millrace", cache) & {"numpy", "click", "msgspec", *FORBIDDEN.split()}


@pytest.mark.timing
def test_the_first_token_of_a_built_engine(built_tiny: Path, cache: Path) -> None:
    arguments = ["-m", "millrace", "generate", str(built_tiny), "-p", "Hi", "--max-tokens", "1"]
    spent_s = best_of_three(arguments, cache)
    assert spent_s < 1.5, f"the first token took {spent_s:.2f} s from the start of the process"


@pytest.mark.timing
def test_the_first_token_of_a_server(built_tiny: Path) -> None:
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        with ServerProcess(built_tiny, ("--log-level", "error")) as server:
            heard = ask(server.url, DemoChatRequest("Hi", 2, seed=1, ignore_eos=True))
            times.append(time.perf_counter() - start_s)
        assert heard.text
    assert min(times) < 1.5, f"the first token took {min(times):.2f} s from the start of the process"


def test_building_and_answering_import_no_framework(cache: Path) -> None:
    code = "from millrace import LLM\nwith LLM('tiny') as llm: llm.chat([{'role': 'user', 'content': 'Hi'}])"
    assert not modules_after(code, cache) & set(FORBIDDEN.split())


def test_serving_imports_no_framework(cache: Path) -> None:
    assert not modules_after("import millrace.cli.serve.options", cache) & set(FORBIDDEN.split())


def test_generating_imports_no_server(built_tiny: Path, cache: Path) -> None:
    code = f"from millrace.cli.main import run; run(['generate', {str(built_tiny)!r}, '-p', 'x', '--max-tokens', '1'])"
    assert not modules_after(code, cache) & {"uvicorn", "starlette", *FORBIDDEN.split()}
