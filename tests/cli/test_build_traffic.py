"""`millrace build --traffic`: the engine is what the recording asks for, and every choice is told with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.build.output import Figures
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.tactics import read_tactics
from millrace.tune.engine_settings import choose_settings
from millrace.tune.settings import TrafficSettings
from tests.cli.conftest import Millrace
from tests.tune.traffic_files import line, written

TINY = BUNDLED / "tiny"


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Three at a time for 90 s, of which each has 100 + 50 of possibly 156 tokens."""
    lines = [line(i // 3, 100, 50, duration=900, max_tokens=156) for i in range(270)]
    return written(tmp_path / "traffic.jsonl", lines)


def settings(told: dict[str, Any]) -> dict[str, Any]:
    return {c["setting"]: (c["value"], c["source"]) for c in told["traffic"]["choices"]}


def test_the_engine_is_what_the_traffic_asks_for(millrace: Millrace, traffic: Path, tmp_path: Path) -> None:
    engine = tmp_path / "e"
    told = json.loads(millrace("build", "tiny", "-o", engine, "--traffic", traffic, "--json").out)
    built = Engine.open(engine)
    page = built.page_bytes
    assert (built.manifest.max_context, built.manifest.max_sequences) == (256, 3)
    assert settings(told) == {
        "max_context": (256, "traffic"), "max_batch": (3, "traffic"), "tune_rows": ("3/128", "traffic"),
        "tune": (0.8, "traffic"), "kv_memory": (9 * page, "traffic"),
    }  # fmt: skip
    table = read_tactics(engine)
    assert table is not None and {c.rows for r in table.regions for c in r.choices} == {3, 128}
    # by default: 2048 tokens of `tiny`, 16 sequences
    assert told["traffic"]["saved"] == {
        "kv_bytes": (16 * 32 - 9) * page, "context_tokens": 2048 - 256, "tune_s": pytest.approx(1.2)
    }  # fmt: skip
    assert all(c["why"] for c in told["traffic"]["choices"]) and told["traffic"]["unfit"] == 0
    assert told["traffic"]["lengths"]["input"] == {"p50": 100, "p90": 100, "p99": 100, "longest": 100}


def test_the_screen_says_why_and_what_is_saved(millrace: Millrace, traffic: Path, tmp_path: Path) -> None:
    shown = millrace("build", "tiny", "-o", tmp_path / "e", "--traffic", traffic, "--max-context", "200", "--tune", "0")
    assert shown.code == 0, shown.err
    for said in (
        "traffic.jsonl: 270 requests in 1.48 min", "200 (as its flag says)", "270 (100 %) would not fit",
        "3 (default 16): at 99 % of the arrivals no more than 3 ran, at most 3; none would have waited, 0 % did",
        "0 s (as its flag says)", "KV memory 1.4 MiB rather than 80 MiB (98% less)",
        "context 200 tokens rather than 2,048 tokens (90% less)", "tuning 0 s rather than 2 s (100% less)",
        "the recording spans 1.48 min, and tells nothing of other hours", "--kv-memory 2M",
    ):  # fmt: skip
        assert said in shown.out, f"{said}\n{shown.out}"


def test_flags_win(millrace: Millrace, traffic: Path, tmp_path: Path) -> None:
    flags = ["--max-context", "512", "--max-batch", "2", "--tune", "0.2", "--tune-rows", "2/16"]
    told = json.loads(millrace("build", "tiny", "-o", tmp_path / "e", "--traffic", traffic, *flags, "--json").out)
    found = settings(told)
    assert found.pop("kv_memory") == (8 * Engine.open(tmp_path / "e").page_bytes, "traffic"), "one full context"
    assert found == {"max_context": (512, "flag"), "max_batch": (2, "flag"), "tune": (0.2, "flag"),
                     "tune_rows": ("2/16", "flag")}  # fmt: skip
    assert (told["max_context"], told["max_sequences"]) == (512, 2)


def test_two_engines_where_day_and_night_differ(millrace: Millrace, tmp_path: Path) -> None:
    lines = [
        line(3600 * (24 * day + hour) + 60 * i, *(100, 20) if 8 <= hour < 20 else (700, 100), duration=100)
        for day in (0, 1) for hour in range(24) for i in range(30 if 8 <= hour < 20 else 3)
    ]  # fmt: skip
    file = written(tmp_path / "t", lines)
    given = ["build", "tiny", "--tune", "0", "--traffic", file]
    one = millrace(*given, "-o", tmp_path / "one.engine")
    assert Engine.open(tmp_path / "one.engine").manifest.max_context == 832
    for said in (
        "08:00 to 20:00 UTC, 720 requests: context 128", "20:00 to 08:00 UTC, 72 requests: context 832",
        "--traffic-part day, night or both",
    ):  # fmt: skip
        assert said in one.out, one.out
    told = json.loads(millrace(*given, "-o", tmp_path / "two.engine", "--traffic-part", "both", "--json").out)
    assert [t["traffic"]["part"] for t in told] == ["day", "night"]
    for name, context in (("day", 128), ("night", 832)):
        assert Engine.open(tmp_path / f"two-{name}.engine").manifest.max_context == context
    millrace(*given, "-o", tmp_path / "night", "--traffic-part", "night")
    assert Engine.open(tmp_path / "night").manifest.max_context == 832
    again = millrace(*given, "-o", tmp_path / "two.engine", "--traffic-part", "both")
    again.assert_mistake("two-day.engine is already there")


def test_mistakes_say_what_to_fix(millrace: Millrace, traffic: Path, tmp_path: Path) -> None:
    build = ("build", "tiny", "-o", tmp_path / "e")
    millrace(*build, "--traffic-covers", "99").assert_mistake("--traffic-covers is given without --traffic")
    millrace(*build, "--traffic", traffic, "--traffic-covers", "20").assert_mistake("50 to 100")
    millrace(*build, "--traffic", traffic, "--traffic-part", "noon").assert_mistake("all, day, night, both")
    millrace(*build, "--traffic", traffic, "--traffic-part", "day").assert_mistake("spans 1.48 min", "a day at least")
    millrace(*build, "--traffic", tmp_path / "absent").assert_mistake("absent cannot be read")
    with traffic.open("a") as file:
        file.write("{}\n")
    millrace(*build, "--traffic", traffic).assert_mistake(f"{traffic}, line 271: Object missing required field")
    written(traffic, [line(0, 1, 1)])
    millrace(*build, "--traffic", traffic).assert_mistake("holds 1 request\n", "59 at least", "record longer")
    written(traffic, [line(0, 5000, 1, duration=1)] * 60)
    refused = millrace(*build, "--traffic", traffic, "--max-context", "5056")
    refused.assert_mistake("a context of 5056 tokens")
    assert not (tmp_path / "e").exists()


def test_memory_that_is_not_there_is_said(traffic: Path, built_tiny: Path) -> None:
    ((_, found),) = choose_settings(TINY, TrafficSettings(traffic=str(traffic)), BuildSettings(), has_tune_flag=False)
    page = Engine.open(built_tiny).page_bytes
    enough, short = (Figures(found, page, page // 2, 9 * page - less) for less in (0, 1))
    assert enough.hint() == "" and "--kv-cache-dtype int8" in short.hint() and "are free" in short.hint()
    assert "int8" not in Figures(found, page, page, 0).hint(), "it is int8 already"
    assert enough.flag == f"--kv-memory {-(-9 * page // (1 << 20))}M"


def test_an_engine_starts_with_the_memory_that_is_proposed(millrace: Millrace, traffic: Path, tmp_path: Path) -> None:
    out = millrace("build", "tiny", "-o", tmp_path / "e", "--traffic", traffic, "--tune", "0").out
    _, _, flag, memory = out.splitlines()[-1].split("  ")[-1].split()[1:]
    told = millrace("generate", tmp_path / "e", "Once", "--max-tokens", "2", flag, memory)
    assert told.code == 0, told.err
