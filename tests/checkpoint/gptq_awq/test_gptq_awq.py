"""GPTQ's and AWQ's folders: what is read is what their packers packed, and what is not read is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.compressed.packing import words_of
from millrace.checkpoint.gptq_awq.packing import in_awq_order, unpack
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.source import Source
from millrace.errors import CheckpointError
from tests.fuzz.originals import write_checkpoint
from tests.support.gptq_awq_files import Packing, awq_gemm_columns, bits_along_rows, rewrite, write_packed

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K of 128 and 96: groups of 64 have a short one."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=128, inner=96)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 96, 100])
def test_words_are_dense_bits(bits: int, n: int) -> None:
    codes = np.random.default_rng(n).integers(0, 1 << bits, (n, 5))
    words = bits_along_rows(codes, bits)
    assert words.shape == (words_of(n, bits), 5)
    np.testing.assert_array_equal(unpack(words, bits, n), codes)


def test_three_bits_are_split_between_words_as_gptq_does() -> None:
    """The eleventh code has its low two bits in the first word's top, and its high bit in the next word."""
    codes = np.zeros((32, 1), np.int64)
    codes[10] = 0b110
    assert bits_along_rows(codes, 3).view(np.uint32).ravel().tolist() == [0b10 << 30, 1, 0]
    assert unpack(bits_along_rows(codes, 3), 3, 32)[10] == 0b110


def test_the_order_of_awq() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (3, 24))
    np.testing.assert_array_equal(in_awq_order(unpack(awq_gemm_columns(codes).T.copy(), 4, 24)), codes.T)


# (how it is stored, what is kept of it, in which precision it runs)
PACKINGS: list[tuple[Packing, QuantisedFormat | None, str]] = [
    (Packing(), QuantisedFormat(4, 32), "w4a16"),
    (Packing("gptq_v2"), QuantisedFormat(4, 32), "w4a16"),
    (Packing(group=64), QuantisedFormat(4, 64), "w4a16"),
    (Packing(group=-1), QuantisedFormat(4, 128), "w4a16"),
    (Packing(symmetric=False), QuantisedFormat(5, 32), "w8a16"),  # a zero times a scale of 11 bits needs more
    (Packing("gptq_v2", symmetric=False, mantissa=7), QuantisedFormat(4, 32, minimums=True), "w4a16"),
    (Packing(bits=2), QuantisedFormat(4, 32), "w4a16"),
    (Packing(bits=2, symmetric=False), QuantisedFormat(4, 32), "w4a16"),
    (Packing(bits=3), QuantisedFormat(4, 32), "w4a16"),
    (Packing("gptq_v2", bits=3, symmetric=False), QuantisedFormat(4, 32), "w4a16"),
    (Packing(bits=8), QuantisedFormat(8, 32), "w8a16"),
    (Packing(bits=8, symmetric=False, mantissa=3), QuantisedFormat(8, 32, minimums=True), "w8a16"),
    (Packing(bits=8, symmetric=False), None, "bf16"),
    (Packing(shuffled=True), None, "bf16"),
    (Packing(symmetric=False, shuffled=True), None, "bf16"),
    (Packing("gemm", symmetric=False), QuantisedFormat(5, 32), "w8a16"),
    (Packing("gemm", symmetric=False, mantissa=7), QuantisedFormat(4, 32, minimums=True), "w4a16"),
    (Packing("gemm", group=-1), QuantisedFormat(4, 128), "w4a16"),
    (Packing("gemv", symmetric=False), QuantisedFormat(5, 32), "w8a16"),
    (Packing("gemv", group=64), QuantisedFormat(4, 64), "w4a16"),
]


@pytest.mark.parametrize("i", range(len(PACKINGS)))
def test_values_and_codes(tmp_path: Path, source: Path, i: int) -> None:
    packing, kept, precision = PACKINGS[i]
    exact = write_packed(tmp_path / "c", source, packing, seed=i)
    opened = Checkpoint.open(tmp_path / "c")
    tensors = opened.tensors
    assert set(tensors) == set(Checkpoint.open(source).tensors)
    for name, values in exact.items():
        np.testing.assert_array_equal(tensors.load(name), values.astype(np.float32), err_msg=name)
    assert tensors.format(f"{Q}.weight") == kept
    for name, values in exact.items():
        stored_format = tensors.format(name)
        assert (stored_format is None) == (kept is None)
        if stored_format is None:
            continue
        matrix = tensors.stored(name, 8, stored_format.group)
        assert matrix is not None and (tensors.stored(name, 4, stored_format.group) is None) == (stored_format.bits > 4)
        np.testing.assert_array_equal(matrix.dequantise(), values, err_msg=name)
        assert tensors.stored(name, 8, stored_format.group + 4) is None
    plan = plan_engine(Source.from_checkpoint(opened), BuildOptions())
    assert plan.precision.default == precision
    assert any("desc_act" in note for note in plan.notes) == packing.shuffled


def test_a_zero_point_of_0_in_the_first_format(tmp_path: Path, source: Path) -> None:
    """It is stored as the highest code, one below modulo 16."""
    write_packed(tmp_path / "c", source, Packing(group=-1))
    words = np.full((1, 8), 0x7777777F, np.uint32).view(np.int32)
    rewrite(tmp_path / "c", {f"{Q}.qzeros": words})
    tensors = Checkpoint.open(tmp_path / "c").tensors
    matrix = tensors.stored(f"{Q}.weight", 4, 128)
    assert matrix is not None
    lowest = matrix.dequantise().min(axis=1)
    assert lowest[0] == 0 and (lowest[1:8] < 0).all() and lowest[8] == 0


CONFIGS: list[tuple[Packing, dict[str, Any], list[str]]] = [
    (Packing(), {"bits": 5}, ["bits is 5", "2, 3, 4 or 8"]),
    (Packing(), {"bits": True}, ["bits is True"]),
    (Packing("gemm"), {"bits": 8}, ["bits is 8", "4"]),
    (Packing(), {"group_size": 6}, ["group_size is 6", "multiple of 4"]),
    (Packing(), {"group_size": 0}, ["group_size is 0"]),
    (Packing(), {"group_size": None}, ["group_size is None"]),
    (Packing(), {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin'", "gptq_v2"]),
    (Packing(), {"dynamic": {"-:.*down.*": {}}}, ["dynamic is", "other arithmetic"]),
    (Packing(), {"rotation": "hadamard"}, ["rotation is 'hadamard'"]),
    (Packing(), {"is_marlin_format": True}, ["is_marlin_format"]),
    (Packing(), {"group_sizes": 128}, ["group_sizes", "group_size"]),
    (Packing("gemm"), {"version": "gemv_fast"}, ["version is 'gemv_fast'", "gemm or gemv"]),
    (Packing("gemm"), {"zero_point": False}, ["zero_point is False"]),
    (Packing(), {"quant_method": "bitnet"}, ["quantization_config", "compressed-tensors, gptq, awq"]),
    (Packing(), {"bits": 8}, [".qzeros is"]),
    (Packing(), {"group_size": 128}, [".qzeros is (3, 16)", "(1, 16), by config.json"]),
]


@pytest.mark.parametrize("i", range(len(CONFIGS)))
def test_what_is_not_read_is_named(tmp_path: Path, source: Path, i: int) -> None:
    packing, fields, words = CONFIGS[i]
    write_packed(tmp_path / "c", source, packing, **fields)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path / "c")
    for word in words:
        assert word in str(caught.value)


DAMAGES: list[tuple[str, Any, str]] = [
    ("qzeros", None, "has no tensor"),
    ("scales", None, "has no tensor"),
    ("scales", np.zeros((4, 4), np.float16), "is (4, 4)"),
    ("scales", np.zeros(4, np.float16), "a matrix of"),
    ("qweight", np.zeros((16, 0), np.int32), "a matrix of"),
    ("g_idx", np.zeros(127, np.int32), "(128,)"),
    ("g_idx", np.full(128, 4, np.int32), "groups beyond 4"),
    ("g_idx", np.full(128, -1, np.int32), "groups beyond 4"),
    ("weight", np.zeros((128, 128), np.float16), "weight and qweight"),
]


@pytest.mark.parametrize("i", range(len(DAMAGES)))
def test_damaged_layers(tmp_path: Path, source: Path, i: int) -> None:
    part, array, words = DAMAGES[i]
    write_packed(tmp_path / "c", source, Packing())
    rewrite(tmp_path / "c", {f"{Q}.{part}": array})
    with pytest.raises(CheckpointError, match=words.replace("(", r"\(").replace(")", r"\)")):
        Checkpoint.open(tmp_path / "c")


def test_scales_that_are_no_numbers(tmp_path: Path, source: Path) -> None:
    write_packed(tmp_path / "c", source, Packing(group=-1))
    rewrite(tmp_path / "c", {f"{Q}.scales": np.full((1, 64), np.nan, np.float16)})
    with pytest.raises(CheckpointError, match="not finite"):
        Source.from_checkpoint(Checkpoint.open(tmp_path / "c"))


def test_greedy_tokens_are_those_of_the_floats(tmp_path: Path, source: Path) -> None:
    """In float32, an engine of codes computes what transformers computes of the weights that they stand for."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    exact = write_packed(tmp_path / "c", source, Packing("gemm", symmetric=False), seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, values in exact.items():
            model.get_parameter(name).copy_(torch.from_numpy(values))
    prompt = [3, 17, 5, 40, 8, 2, 11]
    with torch.no_grad():
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
    with LLM(tmp_path / "c", precision="fp32", tune=0) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert list(result.outputs[0].token_ids) == expected


def test_a_folder_without_codes(tmp_path: Path, source: Path) -> None:
    write_packed(tmp_path / "c", source, Packing())
    for old in (tmp_path / "c").glob("*.safetensors"):
        old.write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no quantized layer"):
        Checkpoint.open(tmp_path / "c")
