"""What somebody asks of a GPU by the wrong name is told by the right one. Tensors of this CPU are the GPU's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from millrace import LLM
from millrace.compile import resolve_model
from millrace.errors import CheckpointError, ConfigError
from millrace.runtime.settings import RunSettings
from tests.e2e.test_on_gpu import HERE
from tests.support.checkpoints import random_encoder
from tests.support.gguf_files import write_gguf
from tests.support.shared import shared

SMALL: dict[str, Any] = {"device": "cuda", "max_batch": 2, "max_context": 64}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)


@pytest.mark.parametrize(("precision", "words"), [
    ("nope", ['precision "nope" is unknown', "on a GPU one of fp32, bf16", "fp16, tf32, fp8", "choose one of them"]),
    ("INT8", ["is unknown", "use w8a8"]),
    ("float16", ["is unknown", "use fp16"]),
    ({"default": "bf16", "lm_head": "fp8"},
     ['"lm_head" is to be fp8, which is of a whole model', "for fp8 without a map, or for fp8a16 here"]),
    ({"default": "tf32"}, ['"default" is to be tf32', "or for fp32 here"]),
])  # fmt: skip
def test_a_precision_that_is_none_there(precision: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM("tiny", precision=precision, **SMALL)
    assert all(w in str(refused.value) for w in words), str(refused.value)


def test_an_encoder_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision fp8 is not measured for encoders") as refused:
        LLM(random_encoder(tmp_path), device="cuda", precision="fp8")
    assert refused.value.expected == "one of fp32, bf16, w8a8, fp16, tf32"


@pytest.mark.parametrize(("device", "fix"), [
    ("CUDA", "write --device cuda"), ("Cuda:1", "write --device cuda:1"), (1, "write --device cuda:1"),
    ("GPU", "write --device cuda"), (None, "write one, or leave it out"), ("mps", "choose one of them"),
])  # fmt: skip
def test_a_device_by_another_name(device: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunSettings(device=device)
    assert refused.value.fix == fix


@pytest.mark.parametrize(
    ("precision", "near"), [("fp8", "measures fp8a16, which is near it,"), ("w4a16", "measures it")]
)
def test_what_is_not_measured_there_is_measured_where_it_can_be(precision: str, near: str) -> None:
    with LLM("tiny", precision=precision, **SMALL) as llm:
        notes = llm._opened.engine.manifest.notes
    assert f"what {precision} costs in answers is not measured on a GPU: millrace build {near} on a CPU" in notes


_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize("method", [
    {"quant_method": "compressed-tensors", "format": "float-quantized",
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROWS}}},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    {"quant_method": "bitnet"},
], ids=lambda method: method["quant_method"])  # fmt: skip
def test_random_weights_of_a_quantised_folder_say_what_they_are(method: dict[str, Any], tmp_path: Path) -> None:
    """Codes are not read, in whichever format they would be: the model's shape is all that is taken."""
    folder = tmp_path / "quantised"
    shutil.copytree(shared("models/stories260K"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with LLM(folder, random_weights=True, **SMALL) as llm:
        assert any(
            "do not follow config.json's quantization_config" in note for note in llm._opened.engine.manifest.notes
        )
    if method["quant_method"] == "bitnet":  # which is not read
        with pytest.raises(CheckpointError, match="quantization_config"):
            LLM(folder, device="cuda")


def test_random_weights_of_a_gguf_file(tmp_path: Path) -> None:
    """It has its own, and is no folder of which a part could be here."""
    path = write_gguf(tmp_path / "m.gguf", shared("models/stories260K"))
    with pytest.raises(ConfigError, match="random_weights is given for a GGUF file") as refused:
        LLM(path, random_weights=True, **SMALL)
    assert "random_weights out" in refused.value.fix
