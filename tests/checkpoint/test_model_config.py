"""`read_config` against transformers' own configuration classes."""

from collections.abc import Mapping
from typing import Any

import pytest

from millrace.checkpoint.config.decoder_sizes import read_sizes
from millrace.checkpoint.config.model_config import ModelConfig, read_config
from tests.support.checkpoints import FAMILIES
from tests.support.published_configs import GEMMA, LLAMA_2, LLAMA_31, MISTRAL_1, PUBLISHED, QWEN_25


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
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    activation = str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"))
    return {
        "hidden_size": config.hidden_size,
        # Of LFM2, two thirds of what is said, rounded up to 256.
        "intermediate_size": 8192 if raw["model_type"] == "lfm2" else config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps if hasattr(config, "norm_eps") else config.rms_norm_eps,
        "theta": rope["rope_theta"],
        "kind": rope["rope_type"],
        "factor": rope.get("factor", 1.0),
        "original_max_positions": rope.get("original_max_position_embeddings"),
        "tie_embeddings": config.tie_word_embeddings,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "attention_output_bias": "model.layers.0.self_attn.o_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
        "activation": {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[activation],
        "windows": _windows(config),
        "dtype": str(config.dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def _windows(config: Any) -> tuple[int, ...]:
    """As its model applies them."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types) if window else ()


def our_view(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(config, key) if hasattr(config, key) else getattr(config.rope, key) for key in keys}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_reads(name: str) -> None:
    expected = transformers_view(PUBLISHED[name])
    assert our_view(read_config(PUBLISHED[name]), expected) == expected


@pytest.mark.parametrize("raw", [*PUBLISHED.values(), *({"model_type": f} for f in FAMILIES if f != "lfm2")], ids=str)
def test_sizing_reads_what_models_read(raw: dict[str, object]) -> None:
    """With a family's defaults for missing keys."""
    config, sizes = read_config(raw), read_sizes(raw, "m")
    assert (sizes.tied, sizes.head_dim, sizes.n_kv_heads) == (
        config.tie_embeddings, config.head_dim, config.n_kv_heads,
    )  # fmt: skip
    assert (sizes.hidden, sizes.n_layers, sizes.ffn) == (config.hidden_size, config.n_layers, config.intermediate_size)
    assert sizes.vocab == config.vocab_size


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


def test_windows_of_layers() -> None:
    mistral = read_config(MISTRAL_1)
    assert (mistral.max_context, mistral.windows, mistral.notes) == (32768, (4096,) * 32, ())
    assert read_config({**MISTRAL_1, "sliding_window": None}).windows == ()
    wide = read_config({**MISTRAL_1, "sliding_window": 65536})
    assert wide.windows == (65536,) * 32 and wide.window_of(3) == 0, "every sequence has room in it"
    on = {**QWEN_25, "use_sliding_window": True, "sliding_window": 1024}
    some = read_config(on)
    assert some.windows == (0,) * 21 + (1024,) * 3 and (some.window_of(20), some.window_of(21)) == (0, 1024)
    assert not any(read_config({**on, "max_window_layers": 24}).windows)
    assert not any(read_config({**on, "layer_types": ["full_attention"] * 24}).windows)
    mixed = ["sliding_attention", "full_attention"] * 12
    assert read_config({**on, "layer_types": mixed}).windows == (1024, 0) * 12
    assert read_config({**QWEN_25, "layer_types": ["full_attention"] * 24}).windows == ()


def test_values_that_are_told() -> None:
    told = read_config({**LLAMA_2, "eos_token_id": 32000, "temperature": 0.6}).notes
    assert len(told) == 2 and "temperature" in told[0] and "32000" in told[1]


def test_dtype_spellings() -> None:
    assert read_config({**LLAMA_2, "torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert read_config({**LLAMA_2, "dtype": "float32"}).dtype == "float32"  # wins over torch_dtype


def test_gemma_says_its_activation_in_many_ways() -> None:
    for act in ("gelu", "gelu_pytorch_tanh"):
        for activation in (None, "gelu_pytorch_tanh"):
            raw = {**GEMMA, "hidden_act": act, "hidden_activation": activation}
            assert read_config(raw).activation == "gelu_tanh"
