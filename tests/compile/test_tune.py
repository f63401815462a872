"""The tuner: what is tried, what is chosen, and the timing cache that makes a build repeatable."""

import random
from pathlib import Path

import pytest

from millrace.compile import tune as tune_module
from millrace.compile.timings import TimingCache, machine_key
from millrace.compile.tune import CLEARLY, SAMPLES, Tuning, choose, regions, tune, tune_folder
from millrace.engine.engine import Engine
from millrace.engine.tables import read_program_table
from millrace.engine.tactics import Choice, Comparison, TacticTable, Timed, read_tactics
from millrace.errors import MachineError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import Memory, usable_cores
from millrace.runtime.open import BUNDLED
from tests.support.engines import build

SECONDS = 1.0  # far more than `tiny` needs, so that a busy machine does not make a difference
KEY = machine_key(usable_isas()[0], usable_cores())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(BUNDLED / "tiny", tmp_path_factory.mktemp("tune") / "engine", "w4a8", max_step_tokens=128)


@pytest.fixture(scope="module")
def tuned(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[TacticTable, Tuning]:
    """Timed once, for all tests that read of it."""
    tuning = Tuning(SECONDS, cache=TimingCache(tmp_path_factory.mktemp("cache") / "deep" / "timings.json"))
    return tune_folder(engine.folder, tuning), tuning


def timed(value: int, median_us: float, samples: int = SAMPLES) -> Timed:
    return Timed(value, median_us, median_us, median_us, samples)


def test_a_setting_must_beat_the_rule_clearly() -> None:
    assert choose([timed(0, 100), timed(4, 100 * CLEARLY - 1), timed(8, 100)]) == 4
    assert choose([timed(0, 100), timed(4, 100 * CLEARLY + 1), timed(8, 120)]) == 0
    assert choose([timed(0, 100), timed(4, 50, SAMPLES - 1)]) == 0, "two samples are no evidence"
    assert choose([timed(0, 100)]) == 0


def test_regions_are_steps_of_one_shape(engine: Engine) -> None:
    steps = read_program_table(engine.folder).steps
    found = regions(steps)
    assert sorted(i for work in found.values() for i in work.steps) == [
        i for i, s in enumerate(steps) if s.kernel == "matmul"
    ]
    for work in found.values():
        shapes = {(steps[i].params["n"], steps[i].params["k"], steps[i].note) for i in work.steps}
        assert len(shapes) == 1
    layers = engine.kv.layers
    assert [len(w.steps) for name, w in found.items() if "sampled" not in name] == [layers] * 4


def test_every_layer_of_a_pass_takes_its_turn(engine: Engine, tuned: tuple[TacticTable, Tuning]) -> None:
    """All settings of a region get the same number of samples, to within one a layer."""
    table, _ = tuned
    assert [r.name for r in table.regions] == list(regions(read_program_table(engine.folder).steps))
    for region in table.regions:
        sampled = "sampled" in region.name
        assert [c.rows for c in region.choices] == ([1, 4] if sampled else [1, 4, 64, 128])
        for choice in region.choices:
            for c in choice.compared:
                samples = [t.samples for t in c.tried]
                assert min(samples) >= SAMPLES and max(samples) - min(samples) <= len(region.steps)
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


def test_only_what_the_cache_lacks_is_timed(engine: Engine, tmp_path: Path) -> None:
    cache = TimingCache(tmp_path / "timings.json")
    name = next(iter(regions(read_program_table(engine.folder).steps)))
    known = Choice(4, {"ahead": 128}, [Comparison("ahead", [timed(0, 2), timed(128, 1)], 128)])
    cache.merge(KEY, {name: [known]})
    cache.merge("another machine", {name: [Choice(1, {"ahead": 64}, [])]})
    table = tune(engine, Tuning(SECONDS, cache=cache))
    found = {c.rows: c for r in table.regions if r.name == name for c in r.choices}
    assert found[4] == known and found[1].compared, "one was known, the others were timed"
    assert cache.read()["another machine"] == {name: [Choice(1, {"ahead": 64}, [])]}
    assert {c.rows for c in cache.read()[KEY][name]} == {1, 4, 64, 128}


def test_merging_keeps_what_it_does_not_replace(tmp_path: Path) -> None:
    """Random merges against a dictionary."""
    cache, draw = TimingCache(tmp_path / "timings.json"), random.Random(1)
    expected: dict[str, dict[str, dict[int, Choice]]] = {}
    for i in range(50):
        machine, region = draw.choice("AB"), draw.choice(["matmul x", "matmul y", "matmul z"])
        choices = [Choice(rows, {"ahead": i}, []) for rows in draw.sample([1, 4, 16], draw.randint(1, 3))]
        cache.merge(machine, {region: choices})
        expected.setdefault(machine, {}).setdefault(region, {}).update({c.rows: c for c in choices})
    assert cache.read() == {
        m: {r: [known[rows] for rows in sorted(known)] for r, known in of.items()} for m, of in expected.items()
    }


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
    path.write_text(content)
    with pytest.raises(MachineError, match="timing cache"):
        tune(engine, Tuning(0.01, cache=TimingCache(path)))


def test_a_cache_that_cannot_be_written_does_not_stop_a_build(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = tune(engine, Tuning(SECONDS, cache=TimingCache(tmp_path / "file" / "timings.json")))
    assert "could not be kept" in table.note and any(r.choices for r in table.regions)


def test_without_the_memory_nothing_is_timed_and_the_table_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "memory", lambda: Memory(1, 1))
    table = tune(engine, Tuning(0.01))
    assert "not timed" in table.note and all(not r.choices for r in table.regions)


def test_time_that_is_up_ends_it(engine: Engine) -> None:
    table: TacticTable = tune(engine, Tuning(1e-9))
    assert all(not r.choices for r in table.regions), "nothing that was not compared in full is kept"
