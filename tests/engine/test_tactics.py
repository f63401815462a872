"""Tactics never change a result, are used only where they were made, and are hostile input like all of an engine."""

import errno
import fcntl
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.compile.resolve_model import BUNDLED
from millrace.engine.artifact import tactics
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import read_program_table
from millrace.engine.artifact.tactics import Choice, TacticTable, TunedRegion, knob_values, read_tactics, write_tactics
from millrace.engine.dummy_step import dummy_step
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import EngineError, MachineError
from millrace.kernels.catalogue import kernels
from millrace.kernels.declare import MAX_KNOBS
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import fingerprint, usable_cores
from tests.support.engines import build

ROWS = (1, 3, 7, 13, 16, 31)
MATMUL = next(k for k in kernels() if k.name == "matmul")


@pytest.fixture(scope="module", params=["bf16", "w8a8", "w4a8", "w4a16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(BUNDLED / "tiny", tmp_path_factory.mktemp("tactics") / "engine", request.param, max_step_tokens=64)


def products(engine: Engine) -> list[int]:
    return calls_of(engine, "matmul")


def calls_of(engine: Engine, kernel: str) -> list[int]:
    return [i for i, s in enumerate(read_program_table(engine.folder).calls) if s.kernel == kernel]


def everything(executor: NativeExecutor, rows: int) -> bytes:
    """All activations of a step: tokens of several sequences where there is room for them."""
    executor.activations()[:] = 0
    executor.run(dummy_step([rows], 0, executor.limits.n_pages, vocab=executor.limits.vocab_size))
    return executor.activations().tobytes()


@pytest.mark.parametrize("isa", usable_isas())
def test_no_tactic_changes_a_bit(engine: Engine, isa: str) -> None:
    executor = engine.executor(n_pages=4, threads=3, isa=isa)
    expected = {rows: everything(executor, rows) for rows in ROWS}
    draw = random.Random(0)
    for _ in range(3):
        entries = [
            (step, at, (draw.randint(0, 17), draw.choice([0, 1, 2, 5, 99]), draw.choice([0, 64, 70, 1 << 20]), 0))
            for step in products(engine)
            for at in sorted(draw.sample(range(1, 40), 3))
        ]
        attention = [(i, 1, (draw.randint(0, 64), draw.randint(0, 16), 0, 0)) for i in calls_of(engine, "attention")]
        executor.set_tactics(sorted(entries + attention))
        for rows in ROWS:
            assert everything(executor, rows) == expected[rows]
    executor.close()


def test_a_tactic_is_chosen_by_the_rows_of_its_step(engine: Engine) -> None:
    """Below, at, between and beyond what there is; a product of sampled rows goes by those."""
    executor = engine.executor(n_pages=8)
    table = read_program_table(engine.folder).calls
    plain = next(i for i in products(engine) if not table[i].params["rows"])
    head = next(i for i in products(engine) if table[i].params["rows"])
    executor.set_tactics([(i, rows, (rows, 0, 0, 0)) for i in sorted((plain, head)) for rows in (2, 4, 8)])

    def chosen(lengths: list[int]) -> tuple[int, int]:
        executor.run(dummy_step(lengths, 0, executor.limits.n_pages, vocab=executor.limits.vocab_size))
        knobs = executor.chosen_tactics()
        others = [i for i in range(len(knobs)) if i not in (plain, head)]
        assert not knobs[others].any()
        return int(knobs[plain, 0]), int(knobs[head, 0])

    expected = {1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 20: 8}
    assert {rows: chosen([rows])[0] for rows in expected} == expected
    assert chosen([20]) == (8, 2) and chosen([1] * 4) == (4, 4) and chosen([3, 3, 3]) == (8, 4)
    executor.set_tactics([])
    assert chosen([4]) == (0, 0)
    executor.close()


HOSTILE = {
    "no such step": [(99999, 1, (0, 0, 0, 0))],
    "a step before the first": [(-1, 1, (0, 0, 0, 0))],
    "no knobs in this kernel": [(0, 1, (1, 0, 0, 0))],
    "too high": [("matmul", 1, (MATMUL.knobs[0].high + 1, 0, 0, 0))],
    "below 0": [("matmul", 1, (0, -1, 0, 0))],
    "a knob that is not declared": [("matmul", 1, (0, 0, 0, 1))],
    "the same rows twice": [("matmul", 4, (0, 0, 0, 0)), ("matmul", 4, (0, 0, 0, 0))],
    "rows out of order": [("matmul", 4, (0, 0, 0, 0)), ("matmul", 1, (0, 0, 0, 0))],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tactics_are_refused(engine: Engine, entries: list[tuple[int | str, int, tuple[int, ...]]]) -> None:
    executor = engine.executor(n_pages=1)
    first = products(engine)[0]
    before = everything(executor, 2)
    with pytest.raises(EngineError, match="tactics do not fit"):
        executor.set_tactics([(first if step == "matmul" else int(step), rows, knobs) for step, rows, knobs in entries])
    assert everything(executor, 2) == before  # what it had before is still there
    executor.close()


def table(engine: Engine, threads: int, knobs: dict[str, int], kernel: str = "matmul") -> TacticTable:
    region = TunedRegion("all products", kernel, products(engine), [Choice(4, knobs, [])])
    return TacticTable(fingerprint(usable_isas()[0]), threads, [region])


def test_tactics_are_used_only_where_they_were_made(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(NativeExecutor, "set_tactics", lambda self, entries: taken.append(len(entries)))
    write_tactics(engine.folder, table(engine, usable_cores(), {"tile_rows": 2}))
    engine.executor(n_pages=1).close()
    assert taken == [len(products(engine))]
    engine.executor(n_pages=1, tuned=False).close()
    engine.executor(n_pages=1, threads=usable_cores() + 1).close()
    for isa in usable_isas()[1:]:
        engine.executor(n_pages=1, isa=isa).close()
    assert len(taken) == 1
    (engine.folder / "tactics.json").unlink()
    assert read_tactics(engine.folder) is None
    engine.executor(n_pages=1).close()
    assert len(taken) == 1


def test_damaged_tactics_say_how_to_fix_them(engine: Engine) -> None:
    path = engine.folder / "tactics.json"
    write_tactics(engine.folder, table(engine, usable_cores(), {"tile_rows": 2}))
    whole = path.read_bytes()
    for damaged, says in (
        (whole.replace(b'"tile_rows": 2', b'"tile_rows": 3'), "checksum"),
        (whole[: len(whole) // 2], "not readable"),
        (whole.replace(b'"threads"', b'"treads"'), "not readable"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(EngineError, match=says) as error:
            engine.executor(n_pages=1)
        assert "millrace tune" in error.value.fix
    too_high = table(engine, 1, {"tile_rows": MATMUL.knobs[0].high + 1})
    for bad in (too_high, table(engine, 1, {"no_such_knob": 1}), table(engine, 1, {"ahead": 1}, kernel="no_kernel")):
        path.write_bytes(msgspec.json.encode(bad))
        with pytest.raises(EngineError, match="not readable"):
            read_tactics(engine.folder)
    elsewhere = TunedRegion("a norm", "matmul", [1], [Choice(4, {"tile_rows": 1}, [])])
    write_tactics(engine.folder, msgspec.structs.replace(table(engine, usable_cores(), {}), regions=[elsewhere]))
    with pytest.raises(EngineError, match="do not fit"):
        engine.executor(n_pages=1)
    path.unlink()


def test_knobs_are_in_the_order_of_their_declaration() -> None:
    values = knob_values("matmul", {"ahead": 7, "tile_rows": 5})
    assert dict(zip([k.name for k in MATMUL.knobs], values, strict=False)) == {
        "tile_rows": 5, "task_panels": 0, "ahead": 7
    }  # fmt: skip
    assert len(values) == MAX_KNOBS and np.all(np.array(values) >= 0)


def test_who_writes_at_once_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers for eight numbers of threads, each between reading and writing for a while."""
    read = tactics.read_tables

    def slow(folder: Path, *, ignore_damaged: bool = False) -> list[TacticTable]:
        found = read(folder, ignore_damaged=ignore_damaged)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(tactics, "read_tables", slow)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: write_tactics(tmp_path, TacticTable({"cpu": "x"}, n, [])), range(1, 9)))
    assert sorted(t.threads for t in read(tmp_path)) == [*range(1, 9)]
    assert [path.name for path in tmp_path.iterdir()] == [tactics.TACTICS], "no lock is left"


def test_a_writer_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tactics, "WRITING_S", 0.1)
    file = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match=r"waited 0\.1 s for another process, which is writing .*tactics\.json"):
            write_tactics(tmp_path, TacticTable({"cpu": "x"}, 1, []))
    finally:
        os.close(file)
    write_tactics(tmp_path, TacticTable({"cpu": "x"}, 1, []))


def test_where_there_are_no_locks_tactics_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    write_tactics(tmp_path, TacticTable({"cpu": "x"}, 1, []))
    assert read_tactics(tmp_path) is not None
