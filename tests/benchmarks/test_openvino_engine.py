"""How OpenVINO's settings are chosen, with no OpenVINO: what is compiled when, what is told of what was tried."""

import random
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.shapes import SHAPES

_NAMES = ("openvino", "openvino.opset13", "openvino.op", "openvino.op.util")
_OURS = ("benchmarks.peers.openvino_ir", "benchmarks.peers.openvino_engine")


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the engine on a stub of the package, and gone afterwards."""
    for name in _NAMES:
        stub = ModuleType(name)
        stub.__getattr__ = lambda _: object  # type: ignore[method-assign]
        stub.__dict__["__version__"] = "stub"
        monkeypatch.setitem(sys.modules, name, stub)
    for name in _OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(_OURS[1])
    for name in _OURS:
        sys.modules.pop(name, None)


class Compiled:
    """Counts how many there were, and which still are."""

    made: list[Mapping[str, str]]

    def __init__(self, _: Path, properties: Mapping[str, str]) -> None:
        self.properties = properties
        self.made.append(properties)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("x_group", [None, 128])
def test_a_counted_run_compiles_nothing(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, x_group: int | None
) -> None:
    """Whichever setting is fastest at each workload: the model that runs it is there, and it has run before."""
    rng, ran = random.Random(seed), []
    monkeypatch.setattr(Compiled, "made", [], raising=False)
    monkeypatch.setattr(engine_module, "CompiledModel", Compiled)

    def run(_: Any, model: Compiled, w: Workload) -> float:
        ran.append((model, w))
        return rng.random()

    monkeypatch.setattr(engine_module.OpenVinoEngine, "_run", run)
    engine = engine_module.OpenVinoEngine(tmp_path / "openvino-int4.xml", SHAPES["tinyllama-1.1b"], 2, x_group)
    for name in ("prefill-512", "decode-1"):
        engine.warm_up(WORKLOADS[name])
    compiled, warm = len(Compiled.made), list(ran)
    for name in ("prefill-512", "decode-1", "prefill-512"):
        engine.run(WORKLOADS[name])
        assert ran[-1] in warm, "its model met this workload before"
    assert len(Compiled.made) == compiled


@pytest.mark.parametrize("x_group, groups", [(None, {"32", "128", str(2**64 - 1)}), (128, {"128"})])
def test_what_was_tried_is_told(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, x_group: int | None, groups: set[str]
) -> None:
    """Each setting once with its seconds, the chosen one among them; int8 in one group alone where that is asked."""
    monkeypatch.setattr(Compiled, "made", [], raising=False)
    monkeypatch.setattr(engine_module, "CompiledModel", Compiled)
    seconds = {"bf16": 1.0, "f32": 2.0}

    def run(_: Any, model: Compiled, __: Workload) -> float:
        return seconds[model.properties["INFERENCE_PRECISION_HINT"]] - 0.5 * ("KV_CACHE_PRECISION" in model.properties)

    monkeypatch.setattr(engine_module.OpenVinoEngine, "_run", run)
    (tmp_path / "openvino-int4.bin").write_bytes(bytes(64))
    engine = engine_module.OpenVinoEngine(tmp_path / "openvino-int4.xml", SHAPES["tinyllama-1.1b"], 2, x_group)
    engine.warm_up(WORKLOADS["prefill-512"])
    described = engine.describe()
    tried = described.settings["tried"]["prefill-512"]
    chosen = described.settings["chosen"]["prefill-512"]
    ints = [t for t in tried if t["activations"] == "f32"]
    assert {str(t["dynamic_group"]) for t in ints} == groups
    assert all(t["seconds"] == seconds[t["activations"]] - 0.5 * (t["kv"] is not None) for t in tried)
    settings = [{k: v for k, v in t.items() if k != "seconds"} for t in tried]
    assert settings.count(chosen) == 1 and all(settings.count(s) == 1 for s in settings)
    assert chosen["kv"] == "u8" and described.activations == ("int8, groups of 128" if x_group else "bf16")
    assert described.settings["hints"]["PERFORMANCE_HINT"] == "LATENCY"
