"""Shapes of models from configurations of many families, and devices by any of their names."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES, Link, find_device
from millrace.size.models import PRESETS, find_model, of_config
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


@pytest.mark.parametrize("config, said", [
    ({}, "has no hidden_size"),
    ({**LLAMA, "hidden_size": "large"}, "hidden_size is 'large'"),
    ({**LLAMA, "num_hidden_layers": 0}, "n_layers is 0"),
    ({**LLAMA, "vocab_size": 1 << 40}, "vocab is"),
    ({**LLAMA, "num_experts": 8}, "visits 0 of 8 experts"),
    ({**LLAMA, "num_experts": 8, "num_experts_per_tok": 9}, "visits 9 of 8 experts"),
])  # fmt: skip
def test_configurations_that_are_none(config: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_config(config, "m")


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"[" * 100_000, b" " * (1 << 21)])
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError):
        find_model(str(tmp_path / "config.json"))


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-8x") as said:
        find_model("llama-3-8x")
    assert "llama-3-8b" in said.value.mend
    with pytest.raises(ConfigError) as said:
        find_device("H10O")
    assert "h100" in said.value.mend


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
