"""How OpenVINO GenAI's settings are chosen, with no OpenVINO: one that cannot run is told, and the others go on."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers.genai_engine import GenAiEngine, Setting
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.shapes import SHAPES


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenAiEngine:
    """On a stub of the packages, and a file of 10 bytes."""
    for name in ("openvino", "openvino_genai"):
        stub = ModuleType(name)
        stub.__dict__["__version__"] = "stub"
        monkeypatch.setitem(sys.modules, name, stub)
    (tmp_path / "model.gguf").write_bytes(bytes(10))
    monkeypatch.setattr(GenAiEngine, "_pipeline", lambda self, setting: setting)
    return GenAiEngine(tmp_path, "Q8_0", NamedWeights(SHAPES["llama-143m"], {}, lambda _: NotImplemented), 2)


@pytest.mark.parametrize(("broken", "chosen"), [("", "PA"), ("PA", "SDPA")])
def test_the_fastest_setting_that_runs_is_measured(
    engine: GenAiEngine, monkeypatch: pytest.MonkeyPatch, broken: str, chosen: str
) -> None:
    def run(_: GenAiEngine, setting: Setting, w: Workload) -> float:
        if setting.backend == broken:
            raise RuntimeError("Exception from there:\nno kernels of this kind\n\n")
        return {"PA": 1.0, "SDPA": 2.0}[setting.backend] - 0.5 * (setting.hint == "f32")

    monkeypatch.setattr(GenAiEngine, "_run", run)
    engine.warm_up(WORKLOADS["decode-1"])
    described = engine.describe()
    assert described.settings["chosen"]["decode-1"] == {"backend": chosen, "hint": "f32", "dynamic_group": None}
    failed = [f"{broken} {how}: no kernels of this kind" for how in ({}, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})]
    assert described.settings["failed"] == (failed if broken else [])
    assert described.activations == "f32" and described.weights_bytes == 10


def test_an_engine_that_runs_in_no_setting_says_why(engine: GenAiEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> float:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(GenAiEngine, "_run", run)
    with pytest.raises(RuntimeError, match="runs in no setting: no kernels; no"):
        engine.warm_up(WORKLOADS["decode-1"])
