"""An engine is hostile input: whatever its bytes say, the answer is an error or a result, never a crash."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from millrace.engine.engine import Engine
from millrace.engine.executor import StepInputs
from millrace.engine.manifest import MANIFEST, PROGRAM, WEIGHTS
from millrace.engine.native import ExecutionError, NativeExecutor, NativeProgram
from millrace.errors import EngineError
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, prompts_as_step
from tests.support.one_step import i32


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("hostile")
    return build(
        random_checkpoint(folder / "checkpoint", "qwen2", seed=1), folder / "engine", "w4a8", max_step_tokens=64
    )


def program(engine: Engine, steps: bytes) -> NativeProgram:
    m = engine.manifest
    return NativeProgram(
        steps=steps, n_steps=m.n_steps, weights=engine.folder / WEIGHTS, weights_bytes=m.weights_bytes,
        activation_bytes=m.activation_bytes, logits_offset=m.logits_offset, max_step_tokens=m.max_step_tokens,
        max_sequences=m.max_sequences, max_context=m.max_context, vocab_size=m.vocab_size, kv=engine.kv,
    )  # fmt: skip


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
            executor = NativeExecutor(program(engine, bytes(bad)), n_pages=4, threads=1)
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
        NativeExecutor(program(engine, good[:-cut]), n_pages=4)


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


def illegal(step: StepInputs, **changes: object) -> StepInputs:
    names = StepInputs.__dataclass_fields__
    return StepInputs(**{n: changes.get(n, getattr(step, n)) for n in names})  # type: ignore[arg-type]


def test_illegal_steps_are_refused_and_the_next_one_runs(engine: Engine) -> None:
    executor = engine.executor(n_pages=4)
    good = prompts_as_step([[1, 2, 3], [5]])
    expected = executor.run(good).tokens
    rows = good.sampling.copy()
    rows["sequence"] = 7
    for bad in (
        illegal(good, tokens=i32([1, 2, 10**6, 5])), illegal(good, tokens=i32([1, 2, -1, 5])),
        illegal(good, positions=i32([0, 1, 3, 0])), illegal(good, positions=i32([0, 1, 2, 64])),
        illegal(good, positions=i32([0, 1, 2, -1])), illegal(good, starts=i32([0, 4, 4])),
        illegal(good, starts=i32([0, 3, 5])), illegal(good, pages=i32([0, 4])), illegal(good, pages=i32([-1, 1])),
        illegal(good, page_starts=i32([0, 1, 3])), illegal(good, sampling=rows),
    ):  # fmt: skip
        with pytest.raises(ExecutionError, match="illegal step"):
            executor.run(bad)
    assert (executor.run(good).tokens == expected).all()
    executor.close()


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=2)
    folders = [build(checkpoint, tmp_path / name, "w8a8").folder for name in ("one", "two")]
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert np.all([len(data) > 0 for data in files[0].values()])
