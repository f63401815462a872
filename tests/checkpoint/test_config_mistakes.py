"""Every way in which a config.json can be wrong: what is refused is named, and nothing ends in another error."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import pytest

from millrace.checkpoint.config.model_config import ModelConfig, read_config
from millrace.errors import CheckpointError
from tests.support.published_configs import GEMMA, LLAMA_2, LLAMA_31, MISTRAL_1, PUBLISHED, QWEN_3, QWEN_25

NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
WRONG: list[tuple[Mapping[str, object], dict[str, object], list[str]]] = [
    # base, changed keys, words that the error must hold
    (LLAMA_2, {"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
    (LLAMA_2, {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
    (LLAMA_2, {"architectures": None, "model_type": "t5"}, ["t5"]),
    (LLAMA_2, {"model_type": "mistral"}, ["model_type", "llama"]),
    (LLAMA_2, {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
    (LLAMA_2, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    (LLAMA_2, {"layer_types": ["sliding_attention"] * 32}, ["layer_types"]),
    (LLAMA_2, {"layer_types": ["full_attention"] * 3}, ["layer_types", "32"]),
    (LLAMA_2, {"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
    (LLAMA_2, {"hidden_size": 0}, ["hidden_size", "from 1"]),
    (LLAMA_2, {"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
    (LLAMA_2, {"hidden_size": True}, ["hidden_size"]),
    (LLAMA_2, {"hidden_size": 4097}, ["4097", "head_dim"]),
    (LLAMA_2, {"num_hidden_layers": None}, ["num_hidden_layers", "None"]),
    (LLAMA_2, {"num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
    (LLAMA_2, {"head_dim": 65}, ["head_dim", "65"]),
    (LLAMA_2, {"rms_norm_eps": 0}, ["rms_norm_eps"]),
    (LLAMA_2, {"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    (LLAMA_2, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
    (LLAMA_2, {"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    (LLAMA_2, {"eos_token_id": list(range(2000))}, ["eos_token_id", "2000 ids", "1024"]),
    (LLAMA_2, {"eos_token_id": -1}, ["eos_token_id", "-1"]),
    (LLAMA_2, {"bos_token_id": [1, 2]}, ["bos_token_id"]),
    (LLAMA_2, {"rope_theta": -1.0}, ["rope_theta"]),
    (LLAMA_2, {"rope_scaling": 3}, ["rope_scaling"]),
    (LLAMA_2, {"rope_scaling": {"type": "yarn"}}, ["factor", "yarn"]),
    (LLAMA_2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast", "2"]),
    (LLAMA_2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, ["truncate", "true"]),
    (LLAMA_2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0}}, ["attention_factor"]),
    (LLAMA_2, {"rope_scaling": {"type": "dynamic"}}, ["factor", "dynamic"]),
    (LLAMA_2, {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope", "short_factor"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear"}}, ["factor", "linear"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, ["rope_type"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
    (LLAMA_2, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
    (LLAMA_2, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["0.25"]),
    (LLAMA_2, {"rope_parameters": NESTED}, ["full_attention", "rope_parameters"]),
    (LLAMA_2, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta", "500000"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}}, ["same"]),
    (MISTRAL_1, {"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, ["sliding_window is None"]),
    (MISTRAL_1, {"sliding_window": 0}, ["sliding_window", "0"]),
    (QWEN_25, {"layer_types": ["sliding_attention"] * 24}, ["layer_types", "full_attention"]),
    (QWEN_3, {"head_dim": None}, ["head_dim", "None"]),
    (LLAMA_31, {"architectures": [[]]}, ["architecture is []", "LlamaForCausalLM"]),
    (LLAMA_31, {"architectures": []}, ["architecture is []", "LlamaForCausalLM"]),
    (QWEN_25, {"layer_types": [["full_attention"]] * 24}, ["layer_types", "24 names"]),
    (GEMMA, {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
    (GEMMA, {"hidden_act": "silu"}, ["hidden_act", "Gemma"]),
    (GEMMA, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
]


HOSTILE: list[object] = [
    [], [[]], [{}], {}, {"a": []}, "", "\ud800", "x" * 10**6, True, -1, 0, 10**400, -(10**400), 1e400, math.nan, 0.5,
    None, [10**400], [None], [[[]]] * 2, {"rope_type": []}, {"rope_type": "llama3"},
    {"factor": 10**400, "rope_type": "linear"},
    {"rope_theta": 10**400}, {"rope_theta": [[]]}, {"type": [], "rope_type": {}}, {"partial_rotary_factor": math.nan},
    {"\x1b": {}}, {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 10**400},
    {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4,
     "original_max_position_embeddings": 10**400},
]  # fmt: skip


def vars_of(config: ModelConfig) -> Iterator[float]:
    for fields in (dataclasses.asdict(config), dataclasses.asdict(config.rope)):
        yield from (v for v in fields.values() if isinstance(v, int | float) and v != config.rope.theta)


@pytest.mark.parametrize("base", [LLAMA_31, MISTRAL_1, QWEN_25, QWEN_3, GEMMA], ids=lambda b: str(b["architectures"]))
def test_any_key_may_have_any_value(base: Mapping[str, object]) -> None:
    """It is read, or refused in a few lines."""
    more = ["layer_types", "rope_parameters", "dtype", "rope_scaling", "head_dim", "\x1b[2J", "sliding_window"]
    for key in [*base, *more]:
        for value in HOSTILE:
            try:
                for number in vars_of(read_config({**base, key: value})):
                    assert abs(number) < 2**63
            except CheckpointError as error:
                assert len(str(error)) < 3000 and str(error).replace("\n", "").isprintable()


@pytest.mark.parametrize(("base", "changed", "words"), WRONG, ids=[str(w[1])[1:40] for w in WRONG])
def test_what_is_wrong_is_named(base: Mapping[str, object], changed: dict[str, object], words: list[str]) -> None:
    read_config(base)
    with pytest.raises(CheckpointError) as caught:
        read_config({**base, **changed})
    for word in words:
        assert word in str(caught.value)


STRANGE_VALUES: list[object] = [None, True, -1, 0, 1, 0.5, 2**70, 1e30, float("nan"), "x", "", [], {}, [1], {"a": 1}]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_value_of_any_key_ends_in_another_error(name: str) -> None:
    """Each is read or refused, and what is refused is named."""
    raw = PUBLISHED[name]
    for key in {*raw, "rope_parameters", "layer_types", "dtype", "head_dim", "quantization_config"}:
        for value in STRANGE_VALUES:
            try:
                read_config({**raw, key: value})
            except CheckpointError as error:
                assert error.what.startswith("config.json: ") and error.expected and error.fix, (key, value)


@pytest.mark.parametrize("key", ["factor", "rope_type", "low_freq_factor", "original_max_position_embeddings", "other"])
def test_no_value_inside_rope_ends_in_another_error(key: str) -> None:
    rope = dict(LLAMA_31["rope_scaling"])  # type: ignore[call-overload]
    for value in STRANGE_VALUES:
        try:
            read_config({**LLAMA_31, "rope_scaling": {**rope, key: value}})
        except CheckpointError as error:
            assert "rope" in error.what, (key, value)
