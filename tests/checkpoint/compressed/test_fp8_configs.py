"""FP8 folders of Hugging Face's and Model Optimizer's writers: values by NumPy, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.quantized_matrix import FP8
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.source import Source
from millrace.errors import CheckpointError
from tests.fuzz.originals import write_checkpoint

Q = "model.layers.0.self_attn.q_proj"
HF: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 32]}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.33"},
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K of 128 and 100: blocks of 32 columns have a short one."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=128, inner=100)


def write_fp8(
    folder: Path, source: Path, fields: dict[str, Any], *, plain: tuple[str, ...] = ("lm_head",), file: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Write random E4M3 codes; return weights by name. plain: modules that stay floats; file: beside config.json"""
    shutil.copytree(source, folder)
    rng, floats = np.random.default_rng(0), Tensors.open(source)
    tensors: dict[str, NDArray[Any]] = {}
    exact = {}
    block = fields.get("weight_block_size")
    suffix = ".weight_scale_inv" if fields["quant_method"] == "fp8" else ".weight_scale"
    for name in floats:
        values, module = floats.load(name), name.removesuffix(".weight")
        if values.ndim == 1 or "embed" in name or module in plain:
            tensors[name] = values
            continue
        N, K = values.shape
        codes = (rng.standard_normal((N, K)) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        if block is None:
            scales = wide = rng.uniform(0.001, 0.002, ()).astype(np.float32)
        else:
            scales = rng.uniform(0.001, 0.002, (-(-N // block[0]), -(-K // block[1]))).astype(np.float32)
            wide = scales.repeat(block[0], 0)[:N].repeat(block[1], 1)[:, :K]
        tensors |= {name: codes, module + suffix: scales}
        if suffix == ".weight_scale":
            tensors[module + ".input_scale"] = np.full((), 0.5, np.float32)
        exact[name] = codes.astype(np.float64) * wide.astype(np.float64)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    safetensors.numpy.save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    if file:
        quantization = {key: value for key, value in fields.items() if key not in ("quant_method", "producer")}
        document = {"producer": fields["producer"], "quantization": quantization}
        (folder / "hf_quant_config.json").write_text(json.dumps(document))
    else:
        raw["quantization_config"] = fields
    (folder / "config.json").write_text(json.dumps(raw))
    return exact


@pytest.mark.parametrize(
    ("fields", "file", "is_kept"),
    [
        (HF, False, False),
        ({**HF, "weight_block_size": None}, False, True),
        ({**HF, "weight_block_size": [64, 128]}, False, True),  # a block is as wide as a row
        (MODELOPT, False, True),
        (MODELOPT, True, True),
    ],
)
def test_values_and_codes(tmp_path: Path, source: Path, fields: dict[str, Any], file: bool, is_kept: bool) -> None:
    exact = write_fp8(tmp_path / "c", source, fields, file=file)
    opened = Checkpoint.open(tmp_path / "c")
    assert set(opened.tensors) == set(Checkpoint.open(source).tensors)
    for name, values in exact.items():
        np.testing.assert_array_equal(opened.tensors.load(name), values.astype(np.float32), err_msg=name)
        matrix = opened.tensors.stored(name, 8, 0)
        assert (matrix is not None) == is_kept
        if matrix is not None:
            np.testing.assert_array_equal(matrix.dequantise(), values, err_msg=name)
    assert opened.tensors.format(f"{Q}.weight") == (FP8 if is_kept else None)
    plan = plan_engine(Source.from_checkpoint(opened), BuildOptions())
    assert plan.precision.default == ("fp8a16" if is_kept else "bf16")
    assert any("FP8" in note and "activations" in note for note in plan.notes)


def test_modules_that_are_not_converted(tmp_path: Path, source: Path) -> None:
    """By name, by part of a name, and by wildcard."""
    fields = {**HF, "modules_to_not_convert": [Q, "down_proj"]}
    write_fp8(tmp_path / "hf", source, fields, plain=("lm_head", Q, *_layers(source, "down_proj")))
    tensors = Checkpoint.open(tmp_path / "hf").tensors
    assert tensors[f"{Q}.weight"].dtype == "float32" and tensors["model.layers.0.mlp.up_proj.weight"].dtype == "fp8"
    fields = {**MODELOPT, "exclude_modules": ["lm_head", "model.layers.*.mlp.down_proj"]}
    write_fp8(tmp_path / "mo", source, fields, plain=("lm_head", *_layers(source, "down_proj")))
    assert Checkpoint.open(tmp_path / "mo").tensors["model.layers.0.mlp.down_proj.weight"].dtype == "float32"


def _layers(source: Path, name: str) -> tuple[str, ...]:
    return tuple(tensor.removesuffix(".weight") for tensor in Tensors.open(source) if f".{name}." in tensor)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**HF, "activation_scheme": "static"}, ["activation_scheme is 'static'", "dynamic"]),
        ({**HF, "weight_block_size": [128]}, ["weight_block_size is [128]"]),
        ({**HF, "weight_block_size": [64, 0]}, ["weight_block_size is [64, 0]"]),
        ({**HF, "weight_block": [64, 64]}, ["weight_block", "weight_block_size"]),
        ({**HF, "scale_fmt": "ue8m0"}, ["scale_fmt is 'ue8m0'"]),
        ({**HF, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert is 'lm_head'"]),
        ({**HF, "weight_block_size": [32, 32]}, ["weight_scale_inv is"]),
        ({**MODELOPT, "quant_algo": "NVFP4"}, ["quant_algo is 'NVFP4'", "FP8"]),
        ({**MODELOPT, "exclude_modules": ["[ab]*"]}, ["a pattern is '[ab]*'"]),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, source: Path, fields: dict[str, Any], words: list[str]) -> None:
    write_fp8(tmp_path / "c", source, HF if fields["quant_method"] == "fp8" else MODELOPT)
    raw = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps({**raw, "quantization_config": fields}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path / "c")
    for word in words:
        assert word in str(caught.value)
