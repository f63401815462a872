"""`read_config` against transformers' own configuration classes, and every way in which a config.json can be wrong."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from millrace.checkpoint.config import ModelConfig, read_config
from millrace.errors import CheckpointError
from tests.support.checkpoints import FAMILIES

# As published on the hub, in the spelling of their time.
LLAMA_31: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2: Mapping[str, object] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_length": 4096,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_1: Mapping[str, object] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN_25: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA: Mapping[str, object] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
PUBLISHED = {"llama 3.1": LLAMA_31, "llama 2": LLAMA_2, "mistral": MISTRAL_1, "qwen 2.5": QWEN_25, "qwen 3": QWEN_3}
PUBLISHED |= {"gemma": GEMMA}


def transformers_view(raw: Mapping[str, object]) -> dict[str, Any]:
    """The same facts, from transformers' configuration class and (for biases) the modules that it builds."""
    import torch
    import transformers

    values = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(str(raw["model_type"]), **values)
    small: dict[str, object] = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    small |= {"num_key_value_heads": 1, "vocab_size": 8, "head_dim": 8, "layer_types": None, "eos_token_id": None}
    small |= {"bos_token_id": None, "pad_token_id": None}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(type(config)(**{**values, **small}))
    names = {name for name, _ in model.named_parameters()}
    eos = config.eos_token_id
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "theta": config.rope_parameters["rope_theta"],
        "kind": config.rope_parameters["rope_type"],
        "factor": config.rope_parameters.get("factor", 1.0),
        "original_max_positions": config.rope_parameters.get("original_max_position_embeddings"),
        "tie_embeddings": config.tie_word_embeddings,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "attention_output_bias": "model.layers.0.self_attn.o_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
        "activation": {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[config.hidden_act],
        "sliding_window": getattr(config, "sliding_window", None),
        "dtype": str(config.dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def our_view(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(config, key) if hasattr(config, key) else getattr(config.rope, key) for key in keys}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_reads(name: str) -> None:
    expected = transformers_view(PUBLISHED[name])
    assert our_view(read_config(PUBLISHED[name]), expected) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_transformers_defaults(family: str) -> None:
    expected = transformers_view({"model_type": family, "dtype": "float32"})
    assert our_view(read_config({"model_type": family}), expected) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_biases(family: str) -> None:
    raw = {"model_type": family, "attention_bias": True, "dtype": "float16"}
    raw |= {"mlp_bias": True} if family == "llama" else {}
    expected = transformers_view(raw)
    assert expected["attention_bias"] and expected["attention_output_bias"]
    assert our_view(read_config(raw), expected) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_spellings_are_one(name: str) -> None:
    raw = dict(PUBLISHED[name])
    rope = dict(raw.pop("rope_scaling", None) or {"rope_type": "default"})  # type: ignore[call-overload]
    rope["rope_theta"] = raw.pop("rope_theta", 10000.0)
    raw["rope_parameters"], raw["dtype"] = rope, raw.pop("torch_dtype")
    assert read_config(raw) == read_config(PUBLISHED[name])


def test_rope_types() -> None:
    llama3 = read_config(LLAMA_31).rope
    assert (llama3.low_freq_factor, llama3.high_freq_factor, llama3.original_max_positions) == (1.0, 4.0, 8192)
    linear = read_config({**LLAMA_2, "rope_scaling": {"type": "linear", "factor": 2}}).rope
    assert (linear.kind, linear.factor, linear.theta) == ("linear", 2.0, 10000.0)
    # an older file has only `type`, a newer one both
    both = read_config({**LLAMA_2, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}).rope
    assert both == linear
    inferred = dict(LLAMA_31["rope_scaling"])  # type: ignore[call-overload]
    del inferred["original_max_position_embeddings"]
    assert read_config({**LLAMA_31, "rope_scaling": inferred}).rope.original_max_positions == 131072


def test_windows_cap_the_context_and_say_so() -> None:
    mistral = read_config(MISTRAL_1)
    assert (mistral.max_context, mistral.sliding_window) == (4096, 4096)
    assert "4096" in mistral.notes[0] and "32768" in mistral.notes[0]
    assert read_config({**MISTRAL_1, "sliding_window": None}).max_context == 32768
    wide = read_config({**MISTRAL_1, "sliding_window": 65536})
    assert (wide.max_context, wide.notes) == (32768, ())
    on = {**QWEN_25, "use_sliding_window": True, "sliding_window": 1024}
    assert read_config(on).max_context == 1024  # layers 21 .. 23 have the window
    assert read_config({**on, "max_window_layers": 24}).sliding_window is None
    assert read_config({**on, "layer_types": ["full_attention"] * 24}).sliding_window is None
    assert read_config({**QWEN_25, "layer_types": ["full_attention"] * 24}).max_context == 32768


def test_values_that_are_told() -> None:
    told = read_config({**LLAMA_2, "eos_token_id": 32000, "temperature": 0.6}).notes
    assert len(told) == 2 and "temperature" in told[0] and "32000" in told[1]


def test_dtype_spellings() -> None:
    assert read_config({**LLAMA_2, "torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert read_config({**LLAMA_2, "dtype": "float32"}).dtype == "float32"  # wins over torch_dtype


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
WRONG: list[tuple[Mapping[str, object], dict[str, object], list[str]]] = [
    # base, changed keys, words that the error must hold
    (LLAMA_2, {"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
    (LLAMA_2, {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
    (LLAMA_2, {"architectures": None, "model_type": "t5"}, ["t5"]),
    (LLAMA_2, {"model_type": "mistral"}, ["model_type", "llama"]),
    (LLAMA_2, {"num_hiden_layers": 3}, ["num_hiden_layers", "num_hidden_layers"]),
    (LLAMA_2, {"attention_sink": 4}, ["attention_sink", "4"]),
    (LLAMA_2, {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
    (LLAMA_2, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    (LLAMA_2, {"sliding_window": 4096}, ["sliding_window"]),
    (LLAMA_2, {"layer_types": ["sliding_attention"] * 32}, ["layer_types"]),
    (LLAMA_2, {"layer_types": ["full_attention"] * 3}, ["layer_types", "32"]),
    (LLAMA_2, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
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
    (LLAMA_2, {"eos_token_id": -1}, ["eos_token_id", "-1"]),
    (LLAMA_2, {"bos_token_id": [1, 2]}, ["bos_token_id"]),
    (LLAMA_2, {"rope_theta": -1.0}, ["rope_theta"]),
    (LLAMA_2, {"rope_scaling": 3}, ["rope_scaling"]),
    (LLAMA_2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
    (LLAMA_2, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["dynamic"]),
    (LLAMA_2, {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear"}}, ["factor", "linear"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, ["rope_type"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, ["beta_fast"]),
    (LLAMA_2, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
    (LLAMA_2, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["0.25"]),
    (LLAMA_2, {"rope_parameters": NESTED}, ["full_attention", "rope_parameters"]),
    (LLAMA_2, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta", "500000"]),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}}, ["same"]),
    (MISTRAL_1, {"attention_bias": True}, ["attention_bias"]),
    (MISTRAL_1, {"sliding_window": 0}, ["sliding_window", "0"]),
    (QWEN_25, {"attention_bias": False}, ["attention_bias", "Qwen2"]),
    (QWEN_25, {"layer_types": ["sliding_attention"] * 24}, ["layer_types", "full_attention"]),
    (QWEN_3, {"head_dim": None}, ["head_dim", "None"]),
    (LLAMA_31, {"architectures": [[]]}, ["architecture is []", "LlamaForCausalLM"]),
    (LLAMA_31, {"architectures": []}, ["architecture is []", "LlamaForCausalLM"]),
    (QWEN_25, {"layer_types": [["full_attention"]] * 24}, ["layer_types", "24 names"]),
    (GEMMA, {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
    (GEMMA, {"hidden_act": "silu"}, ["hidden_act", "Gemma"]),
    (GEMMA, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    (GEMMA, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
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
                assert error.what.startswith("config.json: ") and error.expected and error.mend, (key, value)


@pytest.mark.parametrize("key", ["factor", "rope_type", "low_freq_factor", "original_max_position_embeddings", "other"])
def test_no_value_inside_rope_ends_in_another_error(key: str) -> None:
    rope = dict(LLAMA_31["rope_scaling"])  # type: ignore[call-overload]
    for value in STRANGE_VALUES:
        try:
            read_config({**LLAMA_31, "rope_scaling": {**rope, key: value}})
        except CheckpointError as error:
            assert "rope" in error.what, (key, value)


def test_gemma_says_its_activation_in_many_ways() -> None:
    for act in ("gelu", "gelu_pytorch_tanh"):
        for activation in (None, "gelu_pytorch_tanh"):
            raw = {**GEMMA, "hidden_act": act, "hidden_activation": activation}
            assert read_config(raw).activation == "gelu_tanh"
