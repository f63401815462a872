"""Checkpoints of encoders: config.json, the files of sentence-transformers, names of tensors, WordPiece."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig, read_encoder
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.errors import CheckpointError
from millrace.model.families import parameter_of
from tests.support.checkpoints import random_encoder, write_modules
from tests.support.vocabularies import save_word_pieces

BERT: dict[str, Any] = {"architectures": ["BertModel"], "model_type": "bert"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_encoder(tmp_path)


def opened(folder: Path) -> EncoderConfig:
    config = Checkpoint.open(folder).config
    assert isinstance(config, EncoderConfig)
    return config


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def test_missing_keys_have_transformers_defaults() -> None:
    import transformers

    theirs, ours = transformers.BertConfig(), read_encoder({"model_type": "bert"})
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size,
    )  # fmt: skip
    assert (ours.n_layers, ours.n_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (ours.max_positions, ours.n_types) == (theirs.max_position_embeddings, theirs.type_vocab_size)
    assert (ours.norm_eps, ours.activation) == (theirs.layer_norm_eps, theirs.hidden_act)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"position_embedding_type": "relative_key"}, ["position_embedding_type", "absolute"]),
        ({"is_decoder": True}, ["is_decoder", "false"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"hidden_act": "tanh"}, ["hidden_act", "gelu"]),
        ({"hidden_size": 100}, ["hidden_size", "num_attention_heads"]),
        ({"hidden_size": 36}, ["num_attention_heads", "multiple of 8"]),
        ({"layer_norm_eps": 0}, ["layer_norm_eps"]),
        ({"quantization_config": {}}, ["quantization_config"]),
        (
            {"architectures": ["BertForTokenClassification"]},
            ["BertForTokenClassification", 'did you mean "BertFor', "docs/models.md"],
        ),
        ({"architectures": ["BertForSequenceClassification"]}, ["num_labels is None", "one label"]),
        ({"model_type": "llama"}, ["model_type", "bert"]),
    ],
)
def test_what_a_configuration_cannot_be(changed: dict[str, object], says: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        read_encoder({**BERT, **changed})
    assert all(word in str(error.value) for word in says), error.value


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_roberta_counts_positions_after_the_padding_token(name: str) -> None:
    import transformers

    theirs, ours = transformers.AutoConfig.for_model(name), read_encoder({"model_type": name})
    assert (ours.first_position, ours.max_positions) == (2, theirs.max_position_embeddings - 2)
    assert ours.vocab_size == theirs.vocab_size and ours.norm_eps == theirs.layer_norm_eps
    other = read_encoder({"model_type": name, "pad_token_id": 9, "max_position_embeddings": 11})
    assert (other.first_position, other.max_positions, other.max_context) == (10, 1, 1)
    for pad in (None, -1, 511, True, "1"):
        with pytest.raises(CheckpointError, match=r"pad_token_id is[\s\S]*0 to 510"):
            read_encoder({"model_type": name, "pad_token_id": pad})
    with pytest.raises(CheckpointError, match="is_decoder"):
        read_encoder({"model_type": name, "is_decoder": True})


def test_a_longest_text_that_counts_unused_rows_of_positions(tmp_path: Path) -> None:
    folder = random_encoder(tmp_path, family="roberta")
    for said, expected in ((128, 128), (129, 128), (130, 128), (127, 127)):
        write(folder / "sentence_bert_config.json", {"max_seq_length": said})
        assert opened(folder).max_context == expected
    write(folder / "sentence_bert_config.json", {"max_seq_length": 131})
    with pytest.raises(CheckpointError, match="1 to 128"):
        Checkpoint.open(folder)


# config.json of nomic-embed-text-v1.5, in the words of its own code
NOMIC: dict[str, Any] = {
    "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "bos_token_id": None,
    "causal": False, "dense_seq_output": True, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 96, "n_head": 3, "n_inner": 200,
    "n_layer": 2, "n_positions": 8192, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
    "scale_attn_weights": True, "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": 30528,
}  # fmt: skip


def test_nomic_bert_in_both_spellings() -> None:
    config = read_encoder(NOMIC)
    assert (config.hidden_size, config.intermediate_size, config.n_layers, config.n_heads) == (96, 200, 2, 3)
    assert config.max_positions == config.max_context == 8192 and config.activation == "silu"
    assert config.rope is not None and (config.rope.kind, config.rope.theta) == ("default", 1000.0)
    (note,) = config.notes
    assert "attn_pdrop" in note and "n_embd" not in note
    present = read_encoder({
        "model_type": "nomic_bert", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": 8192, "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    })  # fmt: skip
    assert replace(present, notes=config.notes) == config
    assert read_encoder({"model_type": "nomic_bert"}).rope == config.rope


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden_size": 128}, ["n_embd is 96", "the same as hidden_size, which is 128"]),
        ({"rotary_emb_fraction": 0.5}, ["rotary_emb_fraction", "whole heads"]),
        ({"rotary_scaling_factor": 2.0}, ["rotary_scaling_factor", "null"]),
        ({"prenorm": True}, ["prenorm", "false"]), ({"qkv_proj_bias": True}, ["qkv_proj_bias", "false"]),
        ({"causal": True}, ["causal"]), ({"num_experts": 8}, ["num_experts"]), ({"head_dim": 64}, ["head_dim is 64"]),
        ({"activation_function": "tanh"}, ["hidden_act", "silu"]), ({"n_layer": 0}, ["num_hidden_layers"]),
        ({"n_embd": 97}, ["hidden_size", "a multiple"]), ({"rotary_emb_base": -1}, ["rope_theta"]),
    ],
)  # fmt: skip
def test_what_a_nomic_bert_cannot_be(changed: dict[str, object], says: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        read_encoder({**NOMIC, **changed})
    assert all(word in str(error.value) for word in says), error.value


def test_heads_are_said_to_be_unused() -> None:
    assert read_encoder(BERT).notes == ()
    assert "BertForMaskedLM" in read_encoder({**BERT, "architectures": ["BertForMaskedLM"]}).notes[0]


def test_a_folder_of_sentence_transformers(folder: Path) -> None:
    config = opened(folder)
    assert (config.pooling, config.normalised, config.max_context, config.max_positions) == ("mean", True, 100, 130)
    assert config.notes == () and Checkpoint.open(folder).eos_token_ids == ()
    write_modules(folder, ["Transformer", "Pooling"])
    write(folder / "1_Pooling" / "config.json", {"embedding_dimension": 96, "pooling_mode": "cls"})
    (folder / "sentence_bert_config.json").unlink()
    config = opened(folder)
    assert (config.pooling, config.normalised, config.max_context) == ("cls", False, 130)
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", {**tokens, "model_max_length": 64})
    assert opened(folder).max_context == 64


def test_a_transformer_alone_is_pooled_as_sentence_transformers_does(tmp_path: Path) -> None:
    config = opened(random_encoder(tmp_path, pooling=None))
    assert (config.pooling, config.normalised) == ("mean", False)
    assert "no modules.json" in config.notes[0] and "mean" in config.notes[0]


OTHERS: list[tuple[str, object, list[str]]] = [
    ("modules.json", {"a": 1}, ["module"]),
    ("modules.json", [], ["nothing", "Pooling"]),
    ("modules.json", [1], ["module"]),
    ("modules.json", [{"type": "Transformer", "path": "../x"}], ["../x"]),
    ("modules.json", [{"type": "Transformer", "path": ".."}], ["module"]),
    ("modules.json", [{"type": "Transformer", "path": "x" * 300}], ["module"]),
    ("modules.json", [{"type": "Transformer", "path": "a\0b"}], ["module"]),
    ("modules.json", [{"type": "a.Transformer", "path": "0_T"}, {"type": "a.Pooling", "path": "1_Pooling"}], ["0_T"]),
    ("modules.json", [{"type": "Transformer", "path": ""}, {"type": "Dense", "path": "1"}], ["Dense"]),
    ("modules.json", [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "9_P"}], ["9_P"]),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, ["max", "mean or cls"]),
    ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ["cls and mean"]),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, ["the pooling is nothing"]),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": "yes"}, ["pooling_mode_mean_tokens is 'yes'"]),
    ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, ["lasttoken"]),
    ("1_Pooling/config.json", {"pooling_mode": [["x" * 999]]}, ["mean or cls"]),
    ("1_Pooling/config.json", {"word_embedding_dimension": 97}, ["97", "96"]),
    ("1_Pooling/config.json", {"pooling_mod": "cls"}, ["pooling_mode"]),
    ("1_Pooling/config.json", [], ["object"]),
    ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, ["token_embeddings"]),
    ("sentence_bert_config.json", {"max_seq_length": 131}, ["131", "130"]),
    ("sentence_bert_config.json", {"max_seq_length": 0}, ["max_seq_length"]),
    ("sentence_bert_config.json", {"max_seq_length": True}, ["max_seq_length"]),
    ("sentence_bert_config.json", {"max_seq_len": 3}, ["max_seq_length"]),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, ["fill-mask"]),
    ("sentence_bert_config.json", {"tokenizer_args": {"x": 1}}, ["tokenizer_args"]),
    ("config_sentence_transformers.json", {"prompts": {"q": "query: "}, "default_prompt_name": "q"}, ["'q'"]),
    ("config_sentence_transformers.json", {"prompts": 3}, ["prompts"]),
]


@pytest.mark.parametrize(("name", "value", "says"), OTHERS, ids=lambda v: str(v)[:40])
def test_what_the_other_files_cannot_say(name: str, value: object, says: list[str], folder: Path) -> None:
    write(folder / name, value)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert all(word in str(error.value) for word in says), error.value


def test_prompts_are_named_and_not_used(folder: Path) -> None:
    said = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", said)
    (note,) = opened(folder).notes
    assert "(query)" in note


def test_every_file_that_decides_is_part_of_the_identity(folder: Path) -> None:
    found = [Checkpoint.open(folder).identity()]
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    found.append(Checkpoint.open(folder).identity())
    write_modules(folder, ["Transformer", "Pooling"])
    found.append(Checkpoint.open(folder).identity())
    write(folder / "sentence_bert_config.json", {"max_seq_length": 99})
    found.append(Checkpoint.open(folder).identity())
    assert len(set(found)) == 4


def test_names_of_tensors(folder: Path) -> None:
    """With the prefix and head of a larger model, in the spelling of converted checkpoints, and with a saved table."""
    config = opened(folder)
    plain = {name: parameter_of(name, config) for name in Checkpoint.open(folder).tensors}
    assert plain["embeddings.LayerNorm.weight"] == "embeddings.LayerNorm.weight"
    assert plain["pooler.dense.weight"] is None and plain["pooler.dense.bias"] is None
    assert (
        parameter_of("bert.encoder.layer.0.output.LayerNorm.gamma", config) == "encoder.layer.0.output.LayerNorm.weight"
    )
    assert parameter_of("bert.embeddings.LayerNorm.beta", config) == "embeddings.LayerNorm.bias"
    assert (
        parameter_of("bert.pooler.dense.bias", config) is None and parameter_of("cls.predictions.bias", config) is None
    )
    assert parameter_of("roberta.encoder.layer.0.output.dense.bias", config) == "encoder.layer.0.output.dense.bias"
    assert parameter_of("roberta.pooler.dense.bias", config) is None and parameter_of("lm_head.bias", config) is None
    assert parameter_of("classifier.weight", config) == "classifier.weight"  # and so an error, when it is traced
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays["embeddings.position_ids"] = np.arange(130)[None]
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    assert "embeddings.position_ids" not in Checkpoint.open(folder).tensors


def transformers_ids(folder: Path, text: str) -> list[int]:
    import transformers

    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    return ids


TEXT = "The River runs, naïve and 東京: " * 3


@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_word_pieces(config: dict[str, object], folder: Path) -> None:
    """As transformers reads the file, and neither cut nor padded as it was when it was saved."""
    save_word_pieces(folder, **config)
    ours = open_tokenizer(folder).encode(TEXT)
    assert ours == transformers_ids(folder, TEXT) and len(ours) > 9
    assert ours[0] == 2 and ours[-1] == 3


def test_texts_in_lower_case_where_an_encoder_wants_them(folder: Path) -> None:
    save_word_pieces(folder, do_lower_case=False)
    shouted, said = (open_tokenizer(folder).encode(text) for text in (TEXT.upper(), TEXT.lower()))
    write(folder / "sentence_bert_config.json", {"do_lower_case": True})
    assert open_tokenizer(folder).encode(TEXT.upper()) == said != shouted


def test_a_decoder_is_asked_for(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is an encoder"):
        _ = Checkpoint.open(folder).decoder
