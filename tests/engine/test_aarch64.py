"""The portable build for another architecture: cross-compiled, and run under emulation on a real model."""

import hashlib
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.engine.artifact.engine import Engine
from millrace.kernels import codegen
from millrace.machine.cpu import usable_cores
from tests.support.engines import build
from tests.support.shared import shared

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
N_TOKENS = 200
pytestmark = [
    pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user-static"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/greedy.cpp with all of the native core, as a static program for aarch64.

    Kept in the build folder as long as its sources and its compiler are the same: it takes a core half a minute.
    """
    folder, native, kernels = tmp_path_factory.mktemp("aarch64"), ROOT / "native", ROOT / "src" / "millrace" / "kernels"
    codegen.write(folder, native / "millrace.h")
    assert COMPILER
    command = [
        COMPILER, "-std=c++20", "-O1", "-static", "-pthread", "-ffp-contract=off", "-fno-math-errno",
        "-DMILLRACE_ISA=scalar", '-DMILLRACE_LANES="lanes/scalar.hpp"', f"-I{native}", f"-I{kernels}",
    ]  # fmt: skip
    units = [*sorted(native.glob("*.cpp")), ROOT / "tests" / "native" / "greedy.cpp"]
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(version + repr(command).encode(), digest_size=16)
    for path in (*units, *sorted(native.glob("*.h*")), *sorted(kernels.rglob("*.hpp")), *sorted(folder.iterdir())):
        digest.update(path.name.encode() + path.read_bytes())
    kept = ROOT / "build" / "aarch64" / digest.hexdigest()
    if not kept.exists():
        shutil.rmtree(kept.parent, ignore_errors=True)
        kept.parent.mkdir(parents=True)
        unfinished = kept.with_suffix(".new")
        objects = {unit: folder / f"{number}.o" for number, unit in enumerate(units)}

        def compiled(unit: Path) -> None:
            ran(*command, f"-I{folder}", "-c", unit, "-o", objects[unit])

        with ThreadPoolExecutor(usable_cores()) as threads:
            list(threads.map(compiled, sorted(units, key=lambda unit: -unit.stat().st_size)))  # the longest first
        ran(COMPILER, "-static", "-pthread", *objects.values(), "-o", unfinished)
        unfinished.rename(kept)
    return kept


def ran(*words: object) -> str:
    """What the command says, which must end well."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def greedy(program: Path, engine: Engine, prompt: list[int], n: int) -> list[int]:
    m, (cache,) = engine.manifest, engine.caches
    places = {slot.name: slot.offset for slot in (*m.cpu.inputs, *m.cpu.outputs)}
    numbers = [
        m.cpu.activation_bytes, m.max_context, m.vocab_size, *(s.high for s in m.symbols),
        *(places[name] for name in ("tokens", "positions", "rows", "logits")),
        int(cache.format), cache.layers, cache.heads, cache.key_size, cache.value_size,
    ]  # fmt: skip
    files = [engine.folder / "program.bin", engine.folder / "weights.bin"]
    return [int(token) for token in ran(EMULATOR, program, *files, "scalar", n, *numbers, ":", *prompt).split()]


def test_the_golden_story(program: Path, tmp_path: Path) -> None:
    folder = shared("models/stories260K")
    golden = json.loads((folder / "golden.json").read_text())["greedy_from_bos_ids"]
    engine = build(folder, tmp_path / "engine", "fp32")
    assert greedy(program, engine, golden[:1], N_TOKENS) == golden[1 : N_TOKENS + 1]
