"""The tuner: what is tried, what is chosen, and the timing cache that makes a build repeatable."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from millrace.compile.cache.timing_cache import TimingCache, machine_key
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.tune import tuner as tune_module
from millrace.compile.tune import tuning_regions as regions_module
from millrace.compile.tune.tuner import CLEARLY, FEW_CLEARLY, SAMPLES, SOME, Tuning, choose, tune, tune_folder
from millrace.compile.tune.tuning_cases import TunedRows, cases_of, pages_of
from millrace.compile.tune.tuning_regions import regions, regions_of
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import CallEntry, read_program_table
from millrace.engine.artifact.tactics import (
    TACTICS,
    Choice,
    Comparison,
    TacticTable,
    TacticTiming,
    read_tables,
    read_tactics,
    write_tactics,
)
from millrace.engine.encoder_inputs import text_inputs
from millrace.engine.executor import StepInputs, StepOutputs
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import ConfigError, EngineError, MachineError
from millrace.kernels.catalogue import kernels
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import Memory, usable_cores
from tests.support.checkpoints import random_encoder
from tests.support.engines import build

SECONDS = 60.0  # far more than `tiny` needs, so that a busy machine does not make a difference
KEY = machine_key(usable_isas()[0], usable_cores())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(BUNDLED / "tiny", tmp_path_factory.mktemp("tune") / "engine", "w4a8", max_step_tokens=128)


@pytest.fixture(scope="module")
def tuned(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[TacticTable, Tuning]:
    """Timed once, for all tests that read of it."""
    tuning = Tuning(SECONDS, cache=TimingCache(tmp_path_factory.mktemp("cache") / "deep" / "timings.json"))
    return tune_folder(engine.folder, tuning), tuning


def compared(table: TacticTable) -> bool:
    return any(choice.compared for region in table.regions for choice in region.choices)


def timed(value: int, median_us: float, samples: int = SAMPLES) -> TacticTiming:
    return TacticTiming(value, median_us, median_us, median_us, samples)


def test_a_setting_must_beat_the_rule_clearly() -> None:
    for clearly, samples in ((CLEARLY, SOME), (FEW_CLEARLY, SAMPLES)):
        rule = timed(0, 100, samples)
        assert choose([rule, timed(4, 100 * clearly - 1, samples), timed(8, 100, samples)]) == 4
        assert choose([rule, timed(4, 100 * clearly + 1, samples), timed(8, 120, samples)]) == 0
    assert choose([timed(0, 100), timed(4, 50, SAMPLES - 1)]) == 0, "two samples are no evidence"
    assert choose([timed(0, 100)]) == 0


def test_regions_are_steps_of_one_shape(engine: Engine) -> None:
    steps = read_program_table(engine.folder).calls
    found = regions(steps)
    assert sorted(i for work in found.values() for i in work.calls) == [
        i for i, s in enumerate(steps) if s.kernel in ("matmul", "attention")
    ]
    for work in found.values():
        names = ("n", "k") if work.kernel == "matmul" else ("heads", "kv_heads", "head_dim")
        shapes = {(*(steps[i].params[name] for name in names), steps[i].note) for i in work.calls}
        assert len(shapes) == 1
    layers = engine.caches[0].layers
    assert [len(w.calls) for name, w in found.items() if "sampled" not in name] == [layers] * 5


def test_every_layer_of_a_pass_takes_its_turn(engine: Engine, tuned: tuple[TacticTable, Tuning]) -> None:
    """All settings of a region get the same number of samples, to within one a layer."""
    table, _ = tuned
    assert [r.name for r in table.regions] == list(regions_of(engine))
    for region in table.regions:
        sampled = "sampled" in region.name
        assert [c.rows for c in region.choices] == ([1, 4] if sampled else [1, 4, 64, 128])
        for choice in region.choices:
            for c in choice.compared:
                samples = [t.samples for t in c.tried]
                assert min(samples) >= SAMPLES and max(samples) - min(samples) <= len(region.calls)
                assert c.tried[0].value == 0 and c.chosen == choose(c.tried)
                assert all(0 < t.p10_us <= t.median_us <= t.p90_us for t in c.tried)
                assert choice.knobs.get(c.knob, 0) == c.chosen


def test_with_a_full_cache_nothing_is_timed(
    engine: Engine, tuned: tuple[TacticTable, Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tuning = tuned
    written = (engine.folder / "tactics.json").read_bytes()
    monkeypatch.setattr(tune_module, "_timed", lambda *_: pytest.fail("timed again"))
    assert tune_folder(engine.folder, tuning) == first
    assert (engine.folder / "tactics.json").read_bytes() == written
    assert read_tactics(engine.folder) is not None


def test_tables_for_other_threads_stay(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each executor takes the table for its own number of threads, whichever was written last."""
    folder, cache = Path(shutil.copytree(engine.folder, tmp_path / "e")), TimingCache(tmp_path / "timings.json")
    (folder / TACTICS).unlink(missing_ok=True)
    names, written = list(regions_of(Engine.open(folder))), {}
    for threads in (1, 2, 3):  # nothing is left to be timed, and each number of threads has its own answer
        for name in names:
            knob = "worker_tasks" if name.startswith("attention") else "ahead"
            known = [Choice(rows, {knob: 8 * threads}, [Comparison(knob, [], 0)]) for rows in (1, 4, 64, 128)]
            cache.merge(machine_key(usable_isas()[0], threads), {name: known})
        written[threads] = tune_folder(folder, Tuning(SECONDS, threads, cache))
    assert read_tables(folder) == [written[3], written[2], written[1]]
    taken: list[list[tuple[int, int, tuple[int, ...]]]] = []
    monkeypatch.setattr(NativeExecutor, "set_tactics", lambda self, entries: taken.append(entries))
    for threads in (1, 2, 3, 4):
        Engine.open(folder).executor(n_pages=1, threads=threads).close()
    assert taken == [written[threads].entries() for threads in (1, 2, 3)], "and a fourth has none"
    again = tune_folder(folder, Tuning(SECONDS, 2, cache))
    assert read_tables(folder) == [again, written[3], written[1]] and again == written[2]
    assert not compared(tune_folder(folder, Tuning(1e-9, 5))), "there was no time"
    assert read_tables(folder) == [again, written[3], written[1]], "and nothing to be kept"


def test_tables_are_bounded_and_a_single_one_is_read(engine: Engine, tmp_path: Path) -> None:
    """A file of an engine that was tuned before there were several."""
    table = TacticTable({"cpu": "x"}, 1, [])
    for threads in range(1, 40):
        last = write_tactics(tmp_path, msgspec.structs.replace(table, threads=threads))
    assert [t.threads for t in read_tables(tmp_path)] == list(range(39, 23, -1))
    (tmp_path / TACTICS).write_bytes(msgspec.json.encode(last))
    assert read_tables(tmp_path) == [last]
    for bad in (b"[[]]", b"3", b"[" + msgspec.json.encode(msgspec.structs.replace(last, threads=3)) + b"]"):
        (tmp_path / TACTICS).write_bytes(bad)
        with pytest.raises(EngineError, match=r"tactics\.json is damaged"):
            read_tables(tmp_path)
        assert read_tables(tmp_path, ignore_damaged=True) == []


def test_only_what_the_cache_lacks_is_timed(engine: Engine, tmp_path: Path) -> None:
    cache = TimingCache(tmp_path / "timings.json")
    name = next(iter(regions(read_program_table(engine.folder).calls)))
    known = Choice(4, {"ahead": 128}, [Comparison("ahead", [timed(0, 2), timed(128, 1)], 128)])
    cache.merge(KEY, {name: [known]})
    cache.merge("another machine", {name: [Choice(1, {"ahead": 64}, [])]})
    entries = json.loads((tmp_path / "timings.json").read_text())
    entries["a later version"] = {"matmul": [{"rows": 1, "knobs": {"unheard_of": 1}, "new": 2}]}
    (tmp_path / "timings.json").write_text(json.dumps(entries))
    table = tune(engine, Tuning(SECONDS, cache=cache))
    found = {c.rows: c for r in table.regions if r.name == name for c in r.choices}
    assert found[4] == known and found[1].compared, "one was known, the others were timed"
    assert cache.read("another machine") == {name: [Choice(1, {"ahead": 64}, [])]}
    assert {c.rows for c in cache.read(KEY)[name]} == {1, 4, 64, 128}
    assert json.loads((tmp_path / "timings.json").read_text())["a later version"] == entries["a later version"]


def test_merging_keeps_what_it_does_not_replace(tmp_path: Path) -> None:
    """Random merges against a dictionary."""
    cache, draw = TimingCache(tmp_path / "timings.json"), random.Random(1)
    expected: dict[str, dict[str, dict[int, Choice]]] = {}
    for i in range(50):
        machine, region = draw.choice("AB"), draw.choice(["matmul x", "matmul y", "matmul z"])
        choices = [Choice(rows, {"ahead": i}, []) for rows in draw.sample([1, 4, 16], draw.randint(1, 3))]
        cache.merge(machine, {region: choices})
        expected.setdefault(machine, {}).setdefault(region, {}).update({c.rows: c for c in choices})
    for machine, of in expected.items():
        assert cache.read(machine) == {r: [known[rows] for rows in sorted(known)] for r, known in of.items()}


@pytest.mark.parametrize(
    "content",
    [
        '{"machine": [1, 2',
        "[]",
        '{"m": {"matmul x": [{"rows": -1, "knobs": {}, "compared": []}]}}',
        '{"m": {"matmul x": [{"rows": 1, "knobs": {"no_such_knob": 1}, "compared": []}]}}',
        '{"m": {"matmul x": [{"rows": 1, "knobs": {"ahead": 2147483647}, "compared": []}]}}',
    ],
)
def test_a_cache_that_cannot_be_read_is_an_error(engine: Engine, tmp_path: Path, content: str) -> None:
    path = tmp_path / "timings.json"
    path.write_text(content.replace('"m"', json.dumps(KEY)))
    with pytest.raises(MachineError, match="timing cache"):
        tune(engine, Tuning(0.01, cache=TimingCache(path)))


def test_a_cache_that_cannot_be_written_does_not_stop_a_build(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = tune(engine, Tuning(SECONDS, cache=TimingCache(tmp_path / "file" / "timings.json")))
    assert "could not be kept" in table.note and compared(table) and str(tmp_path) not in table.note


def test_without_the_memory_nothing_is_timed_and_the_table_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "memory", lambda: Memory(1, 1))
    table = tune(engine, Tuning(0.01))
    assert "not timed" in table.note and not compared(table)


def test_time_that_is_up_ends_it(engine: Engine) -> None:
    table: TacticTable = tune(engine, Tuning(1e-9))
    assert not compared(table), "nothing that was not compared in full is kept"
    assert "1, 4, 64, 128 rows" in table.note and "--seconds" in table.note
    assert [c.rows for c in table.regions[0].choices] == [1, 4, 64, 128], "all go by the rule"


def test_a_run_without_time_leaves_what_was_known(engine: Engine, tuned: tuple[TacticTable, Tuning]) -> None:
    before = write_tactics(engine.folder, tuned[0])
    after = tune_folder(engine.folder, Tuning(1e-9, anew=True))
    assert after.regions == before.regions and compared(after)
    other = tune_folder(engine.folder, Tuning(1e-9, threads=usable_cores() + 1, anew=True))
    assert not compared(other), "another number of threads is another machine"


class Wanted:
    """Stands in for the clock: one setting of each knob takes half the time, in some layers of a pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine, wanted: dict[str, int]) -> None:
        names = {k.name: [knob.name for knob in k.knobs] for k in kernels()}
        self.names = [names[call.kernel] for call in read_program_table(engine.folder).calls]
        self.wanted, self.passes = wanted, list[dict[int, dict[str, int]]]()
        monkeypatch.setattr(NativeExecutor, "set_tactics", self.set_tactics)
        monkeypatch.setattr(NativeExecutor, "profile", self.profile)

    def set_tactics(self, entries: list[tuple[int, int, tuple[int, ...]]]) -> None:
        self.passes.append({step: dict(zip(self.names[step], knobs, strict=False)) for step, _, knobs in entries})

    def profile(self, enabled: bool) -> list[float]:
        spent = [1e-3] * 1000
        for step, knobs in (self.passes[-1] if self.passes else {}).items():
            spent[step] = 1e-3 * 0.5 ** sum(knobs.get(name) == value for name, value in self.wanted.items())
        return spent


def test_what_is_fastest_is_chosen_and_kept_for_the_next_knob(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"tile_rows": 8, "ahead": 4096, "task_panels": 1, "worker_tasks": 2, "task_rows": 6, "first_level": 1}
    clock = Wanted(monkeypatch, engine, wanted)
    table = tune(engine, Tuning(5.0, threads=2))
    for region in table.regions:
        for choice in region.choices:
            tried = {c.knob: [t.value for t in c.tried] for c in choice.compared}
            assert choice.knobs == {name: wanted[name] for name, values in tried.items() if wanted[name] in values}
    chosen = {c.rows: c.knobs for r in table.regions if r.kernel == "attention" for c in r.choices}
    deep = {"worker_tasks": 2, "first_level": 1}
    assert chosen == {1: deep, 4: deep, 64: {"task_rows": 6}, 128: {"task_rows": 6}}
    found = regions_of(engine).values()
    layers = next(w.calls for w in found if w.kernel == "matmul" and len(w.calls) > 1)
    spans = next(w.calls for w in found if w.kernel == "attention")
    assert all(len({tuple(p[step].items()) for step in layers}) > 1 for p in clock.passes[:4]), (
        "layers differ in a pass"
    )
    shown = [p[layers[0]] for p in clock.passes]
    assert any(p["ahead"] == 4096 and p["task_panels"] == 1 for p in shown), "what was chosen first is kept"
    shared = [p for p in clock.passes if any(p[step]["worker_tasks"] for step in spans)]
    assert all(p[step]["ahead"] == 4096 for p in shared for step in layers), "and where another kernel's knob is tried"


def test_attention_is_timed_at_depth_in_pages_that_were_written(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence where its context ends, or at 4,096 tokens. Memory that was never written is read far too fast."""
    seen: list[StepInputs] = []
    run = NativeExecutor.run

    def recorded(self: NativeExecutor, step: StepInputs) -> StepOutputs:
        seen.append(step)
        return run(self, step)

    monkeypatch.setattr(NativeExecutor, "run", recorded)
    table = tune(engine, Tuning(1e-9, threads=2))
    context = min(engine.manifest.max_context, 4096)
    (attention,) = (r.name for r in table.regions if r.kernel == "attention")
    assert attention.endswith(f"up to {context} tokens")
    pages = {int(p) for step in seen for p in np.array(step.pages)[step.page_starts[:-1] + step.positions // 64]}
    deep = next(c for c in cases_of(engine) if c.rows == 1)
    assert deep.knobs == ("ahead", "task_panels", "worker_tasks", "first_level")
    assert set(deep.step().pages[: -(-context // 64)]) <= pages and deep.step().positions[0] == context - 1


def test_two_processes_merge_into_one_cache(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from millrace.compile.cache.timing_cache import TimingCache
from millrace.engine.artifact.tactics import Choice
for i in range(40):
    TimingCache(Path(sys.argv[1])).merge("m", {f"matmul {sys.argv[2]} {i}": [Choice(1, {}, [])]})
"""
    path = tmp_path / "timings.json"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [p.wait() for p in running] == [0, 0, 0]
    assert len(TimingCache(path).read("m")) == 120
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".timings.json.") and p.suffix != ".lock"] == []


def test_groups_and_epilogues_are_regions_of_their_own() -> None:
    def step(group: int, *operands: str, scaling: int = 0) -> CallEntry:
        params: dict[str, int | float] = {"n": 64, "k": 64, "weights": 3, "group": group, "scaling": scaling}
        return CallEntry("matmul", "w4a8", [], {name: {} for name in operands}, params)

    assert len(regions([step(32), step(128), step(32, "residual"), step(32, "bias"), step(32)])) == 4
    assert len(regions([step(32), step(32, scaling=1), step(32, scaling=3)])) == 3


@pytest.mark.parametrize(
    "kernel, edit",
    [
        ("matmul", {"n": 0}), ("matmul", {"k": "x"}), ("matmul", {"weights": 99}), ("matmul", {"group": None}),
        ("matmul", {"scaling": 2, "group": 0}), ("attention", {"heads": None}), ("attention", {"kv_heads": 0}),
        ("attention", {"head_dim": 1 << 30}), ("attention", {"rows": 9}),
    ],
)  # fmt: skip
def test_a_program_table_that_does_not_fit_is_damage(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kernel: str, edit: dict[str, object]
) -> None:
    table = read_program_table(engine.folder)
    for step in table.calls:
        if step.kernel == kernel:
            step.params.update(edit)  # type: ignore[arg-type]
    monkeypatch.setattr(regions_module, "read_program_table", lambda _: table)
    with pytest.raises(EngineError, match="does not fit"):
        tune(engine, Tuning(0.1))


def test_an_encoder_is_tuned_and_its_vectors_stay(tmp_path: Path) -> None:
    build(random_encoder(tmp_path / "checkpoint"), tmp_path / "engine", "fp32")
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 403, n) for n in (1, 100, 17, 64)]

    def vectors() -> bytes:
        engine = Engine.open(tmp_path / "engine")
        network = engine.stateless_executor()
        found = network.run(text_inputs(texts, [slot.name for slot in engine.manifest.cpu.inputs]))["embeddings"]
        network.close()
        engine.close()
        return found.tobytes()

    before = vectors()
    table = tune_folder(tmp_path / "engine", Tuning(1.0))
    assert {c.rows for r in table.regions for c in r.choices} == {16, 128, 256} and table.compared()
    knob = {"matmul": "tile_rows", "attention": "task_rows"}
    for height in (4, 12):  # whatever is chosen
        regions = [
            replace(r, choices=[replace(c, knobs={knob[r.kernel]: height}) for c in r.choices]) for r in table.regions
        ]
        write_tactics(tmp_path / "engine", replace(table, regions=regions))
        assert vectors() == before


@pytest.mark.parametrize("text", ["2,7/100", "8/1", "1/128", "1,2,3,4,5,6,7,8/16,24,32,40,48,56,64,128"])
def test_rows_that_were_asked_for_are_timed(engine: Engine, text: str) -> None:
    rows = TunedRows.parse(text, engine.manifest.max_sequences, 128)
    cases = cases_of(engine, rows)
    asked = sorted(int(n) for n in text.replace("/", ",").split(","))
    assert str(rows) == text and sorted(case.rows for case in cases) == asked and rows.n_cases == len(asked)
    for case in cases:  # each is a step that an executor of so many pages takes
        step = case.step()
        assert len(step.tokens) == case.rows and max(step.pages) < pages_of(engine, rows)
        last = step.positions[np.asarray(step.starts[1:]) - 1]
        assert all(last < 64 * np.diff(step.page_starts)), "positions lie in pages"
    table = tune(engine, Tuning(0.2, rows=rows))
    assert sorted({c.rows for r in table.regions for c in r.choices}) == sorted(set(asked))


@pytest.mark.parametrize(
    "text", ["", "1,4", "1/2/3", "1,x/2", "0,1/64", "17/64", "1/129", "/64", "1/1,2,3,4,5,6,7,8,9", "-1/64", "1.5/64"]
)
def test_rows_that_no_step_has_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tune-rows"):
        TunedRows.parse(text, 16, 128)
