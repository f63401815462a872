"""Starting is quick, and brings nothing along that is not needed.

Beside other work a start is judged by its processor time, on an idle machine (timing) by the clock; best of three.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from millrace.bench.demo_load import Ask, ask
from millrace.bench.server_process import ServerProcess
from tests.support.command_line import environment

FORBIDDEN = "torch transformers huggingface_hub rich scipy pandas"


BOTH = pytest.mark.parametrize("idle", [False, pytest.param(True, marks=pytest.mark.timing)], ids=["busy", "idle"])


def children_s() -> float:
    """Processor time of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best_of_three(arguments: Sequence[str], cache: Path, idle: bool) -> float:
    times = []
    clock = time.perf_counter if idle else children_s
    for _ in range(3):
        start_s = clock()
        subprocess.run([sys.executable, *arguments], check=True, env=environment(cache), capture_output=True)
        times.append(clock() - start_s)
    return min(times)


def modules_after(code: str, cache: Path) -> set[str]:
    """Top-level modules that a fresh process has imported after running `code`."""
    code += "\nimport sys; sys.stderr.write(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment(cache), capture_output=True)
    return set(done.stderr.decode().splitlines()[-1].split())


@BOTH
def test_import_costs_next_to_nothing(cache: Path, idle: bool) -> None:
    spent = best_of_three(["-X", "importtime", "-c", "import millrace"], cache, idle)
    assert spent < 0.2, f"import millrace took {spent:.2f} s"
    assert not modules_after("import millrace", cache) & {"numpy", "click", "msgspec", *FORBIDDEN.split()}


@BOTH
def test_the_first_token_of_a_built_engine(built_tiny: Path, cache: Path, idle: bool) -> None:
    arguments = ["-m", "millrace", "generate", str(built_tiny), "-p", "Hi", "--max-tokens", "1"]
    spent = best_of_three(arguments, cache, idle)
    assert spent < 1.5, f"the first token took {spent:.2f} s from the start of the process"


@BOTH
def test_the_first_token_of_a_server(built_tiny: Path, idle: bool) -> None:
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        with ServerProcess(built_tiny, ("--log-level", "error")) as server:
            heard = ask(server.url, Ask("Hi", 2, seed=1, ignore_eos=True))
            used = psutil.Process(server.pid).cpu_times()
            times.append(time.perf_counter() - start_s if idle else used.user + used.system)
            mapped = Path(f"/proc/{server.pid}/maps").read_text()
        assert heard.text and "libmillrace" in mapped
        assert not any(f"/{name}/" in mapped for name in FORBIDDEN.split()), "a framework is loaded"
    assert min(times) < 1.5, f"the first token took {min(times):.2f} s from the start of the process"


def test_building_and_answering_import_no_framework(cache: Path) -> None:
    code = "from millrace import LLM\nwith LLM('tiny') as llm: llm.chat([{'role': 'user', 'content': 'Hi'}])"
    assert not modules_after(code, cache) & set(FORBIDDEN.split())


def test_serving_imports_no_framework(cache: Path) -> None:
    assert not modules_after("import millrace.cli.serve", cache) & set(FORBIDDEN.split())


def test_generating_imports_no_server(built_tiny: Path, cache: Path) -> None:
    code = f"from millrace.cli.main import run; run(['generate', {str(built_tiny)!r}, '-p', 'x', '--max-tokens', '1'])"
    assert not modules_after(code, cache) & {"uvicorn", "starlette", "prometheus_client", *FORBIDDEN.split()}
