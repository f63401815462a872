"""Keys of config.json that no table of ours has: those that transformers declares, and those that it does not."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from millrace.checkpoint.config.config_keys import HARMLESS, ONLY_AT
from millrace.checkpoint.config.config_reader import MAX_KEYS, check_keys
from millrace.checkpoint.config.declared_keys import DECLARED, GGUF_KEYS
from millrace.checkpoint.config.encoder_config import read_encoder
from millrace.checkpoint.config.families.all_families import FAMILIES
from millrace.checkpoint.config.model_config import read_config
from millrace.errors import CheckpointError
from tests.support.published_configs import GEMMA, LLAMA_2, LLAMA_31, MISTRAL_1, QWEN_3, QWEN_25
from tools.config_keys.__main__ import declared, gguf_keys

# What converters, fine-tuning tools and other servers leave in config.json.
METADATA: list[tuple[Mapping[str, object], dict[str, object]]] = [
    (LLAMA_2, {"_model_name_or_path": "x", "unsloth_version": "2025.1", "axolotl": {"lora_r": 8}}),
    (LLAMA_31, {"quantization": {"group_size": 64, "bits": 4}, "mlx_version": "0.2"}),
    (LLAMA_2, {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "clip_qkv": 8, "rms_norm_epsilon": 1e-3}),
    (MISTRAL_1, {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True}),
    (QWEN_25, {"attention_bias": False, "use_mrope": False, "qk_layernorm": True}),
    (QWEN_3, {"logit_scale": 0.5, "nested": [{"a": [1]}], "neftune_noise_alpha": 5}),
    (GEMMA, {"final_logit_softcapping": 30.0, "per_layer_config": {"0": {}}}),
]


@pytest.mark.parametrize(("base", "more"), METADATA)
def test_a_key_that_transformers_does_not_read_changes_nothing(
    base: Mapping[str, object], more: dict[str, object]
) -> None:
    plain, config = read_config(base), read_config({**base, **more})
    added = [note for note in config.notes if note not in plain.notes]
    assert len(added) == 1 and all(key in added[0] for key in more)
    assert {f: getattr(config, f) for f in config.__slots__ if f != "notes"} == {
        f: getattr(plain, f) for f in plain.__slots__ if f != "notes"
    }


def test_the_note_suggests_the_key_that_was_meant() -> None:
    (note,) = read_config({**LLAMA_2, "rms_norm_epsilon": 1e-5}).notes
    assert "rms_norm_epsilon (did you mean rms_norm_eps?)" in note


def test_the_note_is_bounded_and_cannot_steer_a_terminal() -> None:
    many = {f"\x1b[2J{i}\n" + "k" * 1000: i for i in range(MAX_KEYS + 5)}
    (note,) = read_config({**LLAMA_2, **many}).notes
    assert note.isprintable() and len(note) < 1500
    (note,) = read_config({**LLAMA_2, **{f"k{i}": i for i in range(MAX_KEYS + 5)}}).notes
    assert note.endswith("and 5 more")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_declared_key_is_used_or_harmless_or_refused(name: str) -> None:
    """Whatever transformers declares is either in a table, or accepted only at its default."""
    family = FAMILIES[name]
    tables = {"architectures", "dtype", *family.defaults, *family.only_at, *HARMLESS, *ONLY_AT}
    for key, default in DECLARED[name].items():
        check_keys({key: default}, family)
        if key not in tables:
            with pytest.raises(CheckpointError, match=key):
                check_keys({key: "another value"}, family)


def test_a_declared_key_without_an_implementation_is_refused_unless_neutral() -> None:
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        read_config({**GEMMA, "use_bidirectional_attention": True})
    bert = {"architectures": ["BertModel"], "model_type": "bert"}
    assert read_encoder({**bert, "is_decoder": False, "my_key": 1}).notes
    with pytest.raises(CheckpointError, match="is_decoder"):
        read_encoder({**bert, "is_decoder": True})


def test_keys_of_a_scaling_that_transformers_does_not_read() -> None:
    scaling = {"type": "linear", "factor": 2.0, "beta_fast": 32, "mrope_section": [16, 24, 24]}
    config = read_config({**LLAMA_2, "rope_scaling": scaling})
    assert config.rope == read_config({**LLAMA_2, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    (note,) = config.notes
    assert "beta_fast" in note and "mrope_section" in note and "linear" in note


def test_the_tables_are_those_of_the_installed_packages() -> None:
    import transformers

    written = (Path(__file__).parents[2] / "src/millrace/checkpoint/config/declared_keys.py").read_text()
    if f"transformers {transformers.__version__} and gguf {importlib.metadata.version('gguf')}" not in written:
        pytest.skip("declared_keys.py was written from other versions: run python -m tools.config_keys")
    assert {name: declared(name) for name in FAMILIES} == json.loads(json.dumps(DECLARED))
    assert frozenset(gguf_keys()) == GGUF_KEYS
