"""Folders of bitsandbytes: values by NumPy and by the library itself, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from millrace.checkpoint.bitsandbytes.scheme import BitsAndBytes
from millrace.checkpoint.bitsandbytes.tensors import BitsAndBytesTensors
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.source import Source
from millrace.errors import CheckpointError
from tests.fuzz.originals import write_checkpoint
from tests.support.bitsandbytes_files import EIGHT, FOUR, write_bitsandbytes
from tests.support.gptq_awq_files import rewrite

Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 64 numbers lie across rows of 100."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=128, inner=100)


@pytest.mark.parametrize(("fields", "nested"), [(FOUR, True), (FOUR, False), (EIGHT, False)])
def test_values(tmp_path: Path, source: Path, fields: dict[str, Any], nested: bool) -> None:
    exact = write_bitsandbytes(tmp_path / "c", source, fields, nested=nested)
    opened = Checkpoint.open(tmp_path / "c")
    assert set(opened.tensors) == set(Checkpoint.open(source).tensors)
    for name, values in exact.items():
        # one rounding to float32 for each product and sum
        np.testing.assert_allclose(opened.tensors.load(name), values, rtol=4e-7, atol=1e-9, err_msg=name)
        assert opened.tensors[name].shape == values.shape and opened.tensors.format(name) is None
    plan = plan_engine(Source.from_checkpoint(opened), BuildOptions())
    assert plan.precision.default == "bf16" and any("bitsandbytes" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_librarys_own_folders(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    import torch

    torch.manual_seed(0)
    codes, state = functional.quantize_4bit(torch.randn(50, 99), quant_type=kind, compress_statistics=nested)
    tensors = {"m.weight": codes, **{f"m.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    safetensors.numpy.save_file({n: t.numpy() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    values = BitsAndBytesTensors.from_folder(tmp_path, BitsAndBytes(4)).load("m.weight")
    expected = functional.dequantize_4bit(codes, state).float().numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7)


def state(**fields: Any) -> np.ndarray[Any, Any]:
    document = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128], **fields}
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        (STATE, None, "has 0 states"),
        (STATE, np.zeros(5000, np.uint8), "5000 bytes"),
        (STATE, np.frombuffer(b"[" * 2000, np.uint8), "is not JSON"),
        (STATE, np.frombuffer(b"[]", np.uint8), "no JSON object"),
        (STATE, state(shape=[64]), "shape is"),
        (STATE, state(shape=[64, 1 << 40]), "shape is"),
        (STATE, state(blocksize=0), "blocksize is 0"),
        (STATE, state(blocksize=63), "blocksize is 63"),
        (STATE, state(nested_blocksize=256, nested_offset="1"), "nested_offset is '1'"),
        (STATE, state(shape=[64, 130]), "weight is"),
        (f"{Q}.weight.absmax", None, "has no tensor"),
        (f"{Q}.weight.quant_map", np.zeros(15, np.float32), "is (15,)"),
        (f"{Q}.weight.nested_quant_map", np.full(256, np.nan, np.float32), "not finite"),
    ],
)
def test_damaged_layers(tmp_path: Path, source: Path, name: str, array: Any, words: str) -> None:
    write_bitsandbytes(tmp_path / "c", source, FOUR)
    rewrite(tmp_path / "c", {name: array})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path / "c").tensors.load(f"{Q}.weight")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**FOUR, "load_in_8bit": True}, "load_in_4bit is True"),
        ({**FOUR, "load_in_4bits": True}, "load_in_4bits"),
        (EIGHT, "codes of 8 bits"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, source: Path, fields: dict[str, Any], words: str) -> None:
    write_bitsandbytes(tmp_path / "c", source, FOUR)
    raw = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps({**raw, "quantization_config": fields}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path / "c")
    assert words in str(caught.value)
