"""An engine is hostile input: whatever its bytes say, the answer is an error or a result, never a crash."""

import ctypes
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import read_graph_table, read_program_table
from millrace.engine.artifact.manifest import MANIFEST, PROGRAM, WEIGHTS
from millrace.engine.executor import ExecutionError, StepInputs
from millrace.engine.io_slots import Size
from millrace.engine.native.executor import LoadedProgram, NativeExecutor, NativeProgram
from millrace.errors import ConfigError, EngineError, MachineError
from millrace.graph.dims import parse_dim
from millrace.graph.types import Symbol
from millrace.kernels.catalogue import kernels
from millrace.kernels.kernels_digest import kernels_digest
from millrace.kernels.library import usable_isas
from millrace.kernels.rescore.pack import pack_byte_rows
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, prompts_as_step
from tests.support.one_step import i32


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("hostile")
    return build(
        random_checkpoint(folder / "checkpoint", "qwen2", seed=1), folder / "engine", "w4a8", max_step_tokens=64
    )


def program(engine: Engine, calls: bytes | None = None) -> NativeProgram:
    """The engine's, with other calls."""
    good = engine._program()
    return good if calls is None else replace(good, calls=calls)


def loaded(program: NativeProgram, engine: Engine, **others: Any) -> NativeExecutor:
    """With pages, context and vocabulary as the engine says, or `others`."""
    m = engine.manifest
    return NativeExecutor(program, **{"n_pages": 4, "max_context": m.max_context, "vocab_size": m.vocab_size, **others})


@pytest.mark.parametrize("seed", range(8))
def test_any_flipped_program_runs_or_is_refused(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    good = (engine.folder / PROGRAM).read_bytes()
    refused = 0
    for _ in range(25):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(bad) // 4) * 4
            value = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, rng.randrange(2**32), rng.randrange(2**12)])
            bad[at : at + 4] = struct.pack("<I", value)
        try:
            executor = loaded(program(engine, bytes(bad)), engine, threads=1)
        except EngineError:
            refused += 1
            continue
        executor.run(prompts_as_step([[1, 2, 3], [5]]))
        executor.close()
    assert refused > 5, "most changes hit an offset or a size"


@pytest.mark.parametrize("cut", [1, 3, 4, 100, 1001])
def test_a_truncated_program_is_refused(engine: Engine, cut: int) -> None:
    good = (engine.folder / PROGRAM).read_bytes()
    with pytest.raises(EngineError, match="middle of a step"):
        loaded(program(engine, good[:-cut]), engine)


@pytest.mark.parametrize("name", [WEIGHTS, PROGRAM, "program.json", "graph.json", "tokenizer.json"])
def test_a_flipped_byte_is_found(engine: Engine, name: str, tmp_path: Path) -> None:
    for file in engine.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EngineError, match="damaged"):
        Engine.open(tmp_path).executor(n_pages=4)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"format": 99}', b"\xff\xfe", b"[" * 5000]
)
def test_a_broken_manifest_is_refused(engine: Engine, content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(EngineError):
        Engine.open(tmp_path)


@pytest.mark.parametrize("name, read", [("program.json", read_program_table), ("graph.json", read_graph_table)])
def test_a_table_that_is_no_text_is_refused(
    engine: Engine, name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """Also in a key that nobody reads, whose text the decoder does not look at."""
    data = (engine.folder / name).read_bytes()
    for content in (b'{"\xf3": 1,' + data[1:], data.replace(b'"', b'"\xf3', 1), b"\xff\xfe"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EngineError, match=f"{name} is not readable"):
            read(tmp_path)


def illegal(step: StepInputs, **changes: object) -> StepInputs:
    names = StepInputs.__dataclass_fields__
    return StepInputs(**{n: changes.get(n, getattr(step, n)) for n in names})  # type: ignore[arg-type]


def test_illegal_steps_are_refused_and_the_next_one_runs(engine: Engine) -> None:
    executor = engine.executor(n_pages=4)
    good = prompts_as_step([[1, 2, 3], [5]])
    expected = executor.run(good).tokens
    rows = good.sampling.copy()
    rows["token"] = 7
    for bad in (
        illegal(good, tokens=i32([1, 2, 10**6, 5])), illegal(good, tokens=i32([1, 2, -1, 5])),
        illegal(good, positions=i32([0, 1, 3, 0])), illegal(good, positions=i32([0, 1, 2, 64])),
        illegal(good, positions=i32([0, 1, 2, -1])), illegal(good, starts=i32([0, 4, 4])),
        illegal(good, starts=i32([0, 3, 5])), illegal(good, pages=i32([0, 4])), illegal(good, pages=i32([-1, 1])),
        illegal(good, page_starts=i32([0, 1, 3])), illegal(good, sampling=rows),
        illegal(good, copies=i32([[0, 4]])), illegal(good, copies=i32([[-1, 2]])), illegal(good, copies=i32([[2, 2]])),
        illegal(good, copies=i32([2, 3])), illegal(good, copies=np.zeros((1, 2), np.int64)),
    ):  # fmt: skip
        with pytest.raises(ExecutionError, match="illegal step"):
            executor.run(bad)
    assert (executor.run(good).tokens == expected).all()
    executor.close()


def test_any_step_runs_or_is_refused(engine: Engine) -> None:
    """Each array as long as the counts say, with whatever numbers: nothing is read by an index that was not bounded."""
    rng = random.Random(3)
    executor = engine.executor(n_pages=4, threads=1)
    good = prompts_as_step([[1, 2, 3], [5], list(range(40))])
    expected = executor.run(good).tokens
    refused = 0
    for _ in range(400):
        changes: dict[str, object] = {}
        for name in rng.sample(
            ["tokens", "positions", "starts", "pages", "page_starts", "sampling"], rng.randint(1, 2)
        ):
            array = getattr(good, name).copy()
            words = array.view(np.int32)
            for _ in range(rng.randint(1, 3)):
                at, small = rng.randrange(len(words)), int(words[rng.randrange(len(words))])
                words[at] = rng.choice([-(2**31), -1, 0, 1, small, 64, 2**20, 2**31 - 1, rng.randrange(2**31)])
            changes[name] = array
        try:
            executor.run(illegal(good, **changes))
        except ExecutionError as error:
            refused += "an illegal step" in str(error)
    assert refused > 250, "most changes break a rule"
    assert (executor.run(good).tokens == expected).all()
    executor.close()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"positions": i32([0, 1, 2])}, "positions has 3 elements, not 4"),
        ({"tokens": np.zeros(4, np.int64)}, "tokens is int64"),
        ({"pages": i32([[0], [1]])}, "pages is int32\\[2, 1\\]"),
        ({"starts": i32([])}, "starts has 0 elements"),
        ({"page_starts": i32([0, 2])}, "page_starts has 2 elements, not 3"),
        ({"tokens": i32(range(8))[::2]}, "tokens is"),
        ({"bias_ids": i32([1])}, "bias_values has 0 elements, not 1"),
        ({"sampling": np.zeros(2, np.int32)}, "sampling is int32"),
    ],
)
def test_arrays_that_are_no_step_are_refused(engine: Engine, changes: dict[str, object], says: str) -> None:
    executor = engine.executor(n_pages=4)
    with pytest.raises(ExecutionError, match=says):
        executor.run(illegal(prompts_as_step([[1, 2, 3], [5]]), **changes))
    executor.close()


@pytest.mark.parametrize("name, value", [("temperature", np.inf), ("temperature", np.nan), ("top_p", 0), ("min_p", 2)])
def test_sampling_parameters_are_bounded(engine: Engine, name: str, value: float) -> None:
    executor = engine.executor(n_pages=4)
    step = prompts_as_step([[1, 2, 3]])
    step.sampling[name] = value
    with pytest.raises(ExecutionError, match="sampling parameters"):
        executor.run(step)
    executor.close()


LIMITS: list[tuple[str, Any]] = [
    *(("symbols", dict(zip(map(Symbol, "TSR"), n, strict=True))) for n in (
        (0, 8, 8), (-1, 8, 8), (2**31 - 1, 8, 8), (64, 0, 8), (64, 2**31 - 1, 8), (64, 8, 0), (64, 8, 2**31 - 1))),
    ("symbols", {}), ("symbols", {Symbol("T"): 64, Symbol("S"): 8}),
    ("symbols", {Symbol(str(i)): 8 for i in range(9)}),
    *(("activation_bytes", n) for n in (-1, 2**62)), *(("weights_bytes", n) for n in (-1, 2**62)),
]  # fmt: skip


@pytest.mark.parametrize("place", [2**57, 2**62, 3])
@pytest.mark.parametrize("name", ["logits", "tokens", "positions", "rows"])
def test_places_are_bounded(engine: Engine, name: str, place: int) -> None:
    good = program(engine)
    inputs, outputs = (
        tuple(replace(s, offset=place) if s.name == name else s for s in slots) for slots in (good.inputs, good.outputs)
    )
    with pytest.raises(EngineError, match="cannot run"):
        loaded(replace(good, inputs=inputs, outputs=outputs), engine)


@pytest.mark.parametrize("name, value", LIMITS)
def test_limits_are_bounded(engine: Engine, name: str, value: object) -> None:
    """Whatever a manifest says, sizes are checked before anything is multiplied with them."""
    bad = replace(program(engine), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="cannot run"):
        loaded(bad, engine)
    with pytest.raises(EngineError, match="cannot run"):
        LoadedProgram(bad, n_pages=4)


@pytest.mark.parametrize("text", ["4294967297", "(T + 4294967296)//4294967297", "T - 99999999999999999999"])
def test_numbers_in_sizes_are_bounded(engine: Engine, text: str) -> None:
    with pytest.raises(EngineError, match="a number beyond 32 bits"):
        loaded(replace(program(engine), sizes=(Size(parse_dim(text), 256),)), engine)


def test_sizes_of_steps_without_rows(engine: Engine) -> None:
    """Nothing is divided by the number of rows, which may be 0."""
    executor = loaded(replace(program(engine), sizes=(Size(parse_dim("T/R"), 256),)), engine)
    step = prompts_as_step([[1, 2]])
    assert len(executor.run(step).tokens) == 1 and not len(
        executor.run(replace(step, sampling=step.sampling[:0])).tokens
    )
    executor.close()


@pytest.mark.parametrize(
    "name, value", [*(("max_context", n) for n in (0, -1, 2**31 - 1)), *(("vocab_size", n) for n in (0, -1, 2**31 - 1))]
)
def test_what_a_language_model_says_is_bounded(engine: Engine, name: str, value: int) -> None:
    with pytest.raises(EngineError, match=f"cannot run.*{name}"):
        loaded(program(engine), engine, **{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        *({name: n} for name in ("layers", "heads", "key_size", "value_size") for n in (2**31 - 1, 0)),
        {"place": 2**40},
        {"place": 3},
        {"place": 0},
        {"heads": 3},
        {"key_size": 8},
        {"layers": 1},
    ],
)
def test_the_shape_of_pages_is_bounded(engine: Engine, changes: dict[str, Any]) -> None:
    good = program(engine)
    with pytest.raises(EngineError, match="cannot run"):
        loaded(replace(good, caches=(replace(good.caches[0], **changes),)), engine)
    with pytest.raises(EngineError, match="cannot run"):
        loaded(replace(good, caches=good.caches * 9), engine)
    with pytest.raises(EngineError, match="cannot run"):
        loaded(replace(good, caches=()), engine)
    with pytest.raises(EngineError, match="kv_pages"):
        loaded(good, engine, n_pages=2**62)


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**31])
def test_threads_are_a_number_of_threads(engine: Engine, threads: int) -> None:
    with pytest.raises(ConfigError, match="1 to 1024"):
        engine.executor(n_pages=4, threads=threads)


def test_without_a_number_all_cores_compute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.engine.native.executor.usable_cores", lambda: 3)
    executor = engine.executor(n_pages=4)
    assert executor.threads == 3
    executor.close()


def test_an_instruction_set_that_no_build_knows(engine: Engine) -> None:
    with pytest.raises(MachineError, match='"mmx" cannot run here: this build knows') as error:
        engine.executor(n_pages=4, isa="mmx")
    assert error.value.expected == "one of " + ", ".join(usable_isas())


def test_an_instruction_set_that_the_cpu_lacks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AVX-512, where the library refuses it with this reason."""

    class Lacking:
        def mr_create(self, args: object, handle: object, error: "ctypes.Array[ctypes.c_char]", n_bytes: int) -> int:
            error.value = b'instruction set "avx512" cannot run here: it needs AVX-512 F'
            return 1

    monkeypatch.setattr("millrace.engine.native.executor.library", Lacking)
    monkeypatch.setattr("millrace.engine.native.executor.usable_isas", lambda: ["avx2", "scalar"])
    with pytest.raises(MachineError, match="it needs AVX-512 F") as error:
        engine.executor(n_pages=4, isa="avx512")
    assert error.value.expected == "one of avx2, scalar" and "--isa" in error.value.fix


OUT_OF_THREADS = """
import resource, sys
from pathlib import Path
from millrace.engine.artifact.engine import Engine
from millrace.errors import ConfigError, EngineError, MachineError
engine = Engine.open(Path(sys.argv[1]))
engine.executor(n_pages=4, threads=2).close()
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
try:
    engine.executor(n_pages=4, threads=1000)
except EngineError as error:
    print(error.what)
"""


def test_threads_that_cannot_be_started_are_an_error(engine: Engine) -> None:
    done = subprocess.run([sys.executable, "-c", OUT_OF_THREADS, str(engine.folder)], capture_output=True, text=True)
    assert done.returncode == 0 and "of 1000 threads can be started" in done.stdout, done.stdout + done.stderr


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=2)
    folders = [build(checkpoint, tmp_path / name, "w8a8").folder for name in ("one", "two")]
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert np.all([len(data) > 0 for data in files[0].values()])


@pytest.mark.parametrize("change", [{"format": 3}, {"cpu": {"kernels": "0123456789abcdef"}}, {"cpu": {}}, {"cpu": 1}])
def test_engines_for_other_kernels_are_refused(engine: Engine, change: dict[str, object], tmp_path: Path) -> None:
    """Whatever else the manifest says is not looked at."""
    manifest = {**json.loads((engine.folder / MANIFEST).read_bytes()), **change}
    (tmp_path / MANIFEST).write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
    with pytest.raises(EngineError, match=r"format 3|for other kernels|for which kernels") as error:
        Engine.open(tmp_path)
    assert "build it again" in error.value.fix


def test_the_digest_knows_declarations_and_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kernels_digest()) == 16
    fresh = kernels_digest.__wrapped__
    assert fresh() == kernels_digest()
    with monkeypatch.context() as changed:
        changed.setattr("millrace.kernels.catalogue.kernels", lambda: kernels()[::-1])
        assert fresh() != kernels_digest()
    with monkeypatch.context() as changed:
        changed.setattr("millrace.kernels.kernels_digest.pack_byte_rows", lambda q: pack_byte_rows(q)[1:])
        assert fresh() != kernels_digest()
