"""Shapes of models from configurations of many families, and devices by any of their names."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import CheckpointError, ConfigError
from millrace.machine.devices import DEVICES, Link, find_device
from millrace.size.performance.models import PRESETS, find_model, shape_from_config
from tests.size.tables import SIZING, needs_tables

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
BILLIONS = {  # all parameters, as their makers publish them
    "llama-2-7b": 6.74, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "nemotron-4-15b": 15.6, "nemotron-4-340b": 341, "falcon-7b": 6.92,
    "falcon-40b": 41.3, "falcon-180b": 178.8, "mpt-7b": 6.65, "mpt-30b": 29.96, "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "smollm2-135m": 0.1345, "tinyllama-1.1b": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert PRESETS[name].stored_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_tokens_leave_the_known_bytes_in_a_cache() -> None:
    for name, nbytes in (("llama-3-8b", 131_072), ("llama-2-70b", 327_680), ("nemo-43b", 1_572_864)):
        assert PRESETS[name].kv_values * 2 == nbytes


@pytest.mark.parametrize("changed, expected", [
    ({}, "llama-3-8b"),
    ({"head_dim": None}, "llama-3-8b"),
    ({"num_hidden_layers": None, "n_layers": 32, "hidden_size": None, "d_model": 4096, "model_type": "mpt",
      "num_attention_heads": None, "n_heads": 32, "num_key_value_heads": None, "intermediate_size": None,
      "vocab_size": 50432, "max_position_embeddings": None, "max_seq_len": 2048,
      "tie_word_embeddings": True}, "mpt-7b"),
    ({"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
      "num_experts_per_tok": 2, "sliding_window": None}, "mixtral-8x7b"),
    ({"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768,
      "sliding_window": 4096}, "mistral-7b"),
])  # fmt: skip
def test_configurations_of_several_families(tmp_path: Path, changed: Mapping[str, Any], expected: str) -> None:
    config = {key: value for key, value in {**LLAMA, **changed}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, preset = find_model(str(tmp_path)), PRESETS[expected]
    for name in preset.__dataclass_fields__:
        assert name == "name" or getattr(found, name) == getattr(preset, name), name


# Qwen1.5-MoE-A2.7B and GPT-OSS-20B as their makers published them, the sizes that count.
QWEN_MOE = {
    "model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "vocab_size": 151936,
    "max_position_embeddings": 8192, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


def test_experts_that_all_visit_are_counted() -> None:
    """14.3 billion parameters, of which 2.7 are active for a token, as its makers say (with embeddings and head)."""
    found = shape_from_config(QWEN_MOE, "m")
    assert found.stored_parameters / 1e9 == pytest.approx(14.3, rel=0.01) and found.window is None
    assert (found.active_parameters + 2 * found.head_parameters) / 1e9 == pytest.approx(2.7, rel=0.01)
    assert found.touched_parameters(1) == pytest.approx(found.active_parameters)
    counted = {key: value for key, value in QWEN_MOE.items() if key != "shared_expert_intermediate_size"}
    assert shape_from_config({**counted, "n_shared_experts": 4}, "m") == found


def test_a_window_of_some_layers_is_none_of_all() -> None:
    found = shape_from_config(GPT_OSS, "m")
    assert found.window is None and found.attended_tokens(5000) == 5000
    assert found.parameters == PRESETS["gpt-oss-20b"].parameters
    assert (
        shape_from_config({**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention"] * 32}, "m").window
        == 128
    )
    for more in ({"model_type": "gemma2"}, {"sliding_window_pattern": 6}, {"sliding_window_pattern": "LLLG"}):
        assert shape_from_config({**LLAMA, "sliding_window": 128, **more}, "m").window is None


def test_a_model_that_sees_is_sized_by_its_decoder() -> None:
    found = shape_from_config({"model_type": "mllama", "text_config": LLAMA, "vision_config": {"hidden_size": 1}}, "m")
    assert found == shape_from_config(LLAMA, "m")


@pytest.mark.parametrize("config, said", [
    ({**LLAMA, "kv_lora_rank": 512}, "compressed"), ({**LLAMA, "attn_layer_period": 8}, "layers without attention"),
    ({**LLAMA, "text_config": {"hybrid_override_pattern": "M-M*"}}, "layers without attention"),
    ({}, "has no hidden_size"),
    ({**LLAMA, "hidden_size": "large"}, "hidden_size is 'large'"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({**LLAMA, "vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
    ({**LLAMA, "hidden_size": 1 << 24, "intermediate_size": None}, "ffn is 67108864"),
    ({**LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1 << 20}, "for shared experts"),
    ({**LLAMA, "text_config": 5}, "text_config is 5"), ({**LLAMA, "model_type": ["llama"]}, "model_type is"),
    ({**LLAMA, "layer_types": "full"}, "layer_types is 'full'"), ({**LLAMA, "layer_types": [1]}, "layer_types is"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'[^|]*true or false"),
    ({**LLAMA, "use_sliding_window": 1}, "use_sliding_window is 1"),
    ({**LLAMA, "multi_query": "true"}, "multi_query is 'true'"),
    ({**LLAMA, "num_key_value_heads": 33}, "33 heads of keys and values for 32 of queries"),
    ({**LLAMA, "num_experts": 8}, "visits 0 of 8 experts"),
    ({**LLAMA, "num_experts": 8, "num_experts_per_tok": 9}, "visits 9 of 8 experts"),
])  # fmt: skip
def test_configurations_that_are_none(config: Mapping[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=said):
        shape_from_config(config, "m")


_NUMBERS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window", "sliding_window_pattern",
)  # fmt: skip
_COUNTS = ("num_experts", "num_experts_per_tok", "n_shared_experts", "shared_expert_intermediate_size")  # 0: none


@pytest.mark.parametrize("value", ["-5", "0", "NaN", "Infinity", "-Infinity", "1e3", "99999999999", "true", '"4096"'])
@pytest.mark.parametrize("key", [*_NUMBERS, *_COUNTS])
def test_numbers_that_are_none_are_named(tmp_path: Path, key: str, value: str) -> None:
    """By the key that the file has: they were dropped (a window), taken (shared experts) or told by another name."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN_MOE, "use_sliding_window": True, key: "HERE"}).replace('"HERE"', value))
    if key in _COUNTS and value == "0":
        if key == "num_experts_per_tok":
            with pytest.raises(ConfigError, match="visits 0 of 60 experts"):
                find_model(str(file))
        else:
            find_model(str(file))
        return
    low = 0 if key in _COUNTS else 1
    with pytest.raises(CheckpointError, match=rf": {key} is [^|]*an integer from {low} to 16777216"):
        find_model(str(file))


def test_a_window_that_is_switched_off_is_not_read() -> None:
    assert shape_from_config({**LLAMA, "sliding_window": -5, "use_sliding_window": False}, "m").window is None
    assert shape_from_config({**LLAMA, "sliding_window": None}, "m").window is None


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"[" * 100_000, b" " * (1 << 21)])
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError):
        find_model(str(tmp_path / "config.json"))


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-8x") as said:
        find_model("llama-3-8x")
    assert "llama-3-8b" in said.value.fix
    with pytest.raises(ConfigError) as said:
        find_device("H10O")
    assert "h100" in said.value.fix


@pytest.mark.parametrize("name", ["H100", "h100 sxm", "NVIDIA H100 80GB HBM3"])
def test_devices_by_any_of_their_names(name: str) -> None:
    assert find_device(name).name == "H100 SXM"


@needs_tables
def test_the_catalogue_says_what_the_datasheets_say() -> None:
    with (SIZING / "gpu_datasheet.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(DEVICES) == 25
    for row in rows:
        found = find_device(row["name"].removesuffix(" (CPU)"))
        for precision in ("fp16", "bf16", "fp8", "int8", "fp4"):
            column = f"{precision}_dense_{'tops' if precision == 'int8' else 'tflops'}"
            assert found.peaks.get(precision, 0) == pytest.approx(float(row[column] or 0) * 1e12), (
                found.name,
                precision,
            )
        assert found.bandwidth == pytest.approx(float(row["mem_bw_gbs"]) * 1e9)
        assert found.memory_bytes == pytest.approx(float(row["mem_gb"]) * 1e9)
        assert found.watts == int(row["tdp_w"])
        assert (found.link == Link.BRIDGE) == ("bridge" in row["link_type"]), found.name


@pytest.mark.parametrize("name, precision", [("V100", "bf16"), ("T4", "fp8"), ("A100", "fp8"), ("H200", "fp4")])
def test_a_device_refuses_what_it_does_not_multiply(name: str, precision: str) -> None:
    with pytest.raises(ConfigError, match=f"does not multiply {precision}"):
        find_device(name).peak(precision)
