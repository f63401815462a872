"""The configuration out of a file's metadata: the same as from config.json, and errors that name the key."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.generation_config import read_generation
from millrace.errors import CheckpointError
from millrace.model.layers import inverse_frequencies
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import FAMILIES, Edit, add_tokenizer, write_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_configuration_of_its_folder(tmp_path: Path, family: str) -> None:
    folder = random_checkpoint(tmp_path / "folder", family, seed=2, **FAMILIES[family])
    theirs, ours = Checkpoint.open(folder).decoder, Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder)).decoder
    own = {"architecture", "family", "eos_token_ids"}  # Mistral's files say llama; ends of a turn: test_vocabulary.py
    differing = {name for name in theirs.__slots__ if getattr(theirs, name) != getattr(ours, name)}
    assert differing <= (own if family == "mistral" else {"eos_token_ids"})


def test_a_linear_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    folder = random_checkpoint(tmp_path / "folder", "llama", rope_parameters=scaling)
    theirs = Checkpoint.open(folder).decoder.rope
    assert Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder)).decoder.rope == theirs and theirs.factor == 4


def test_rope_freqs_are_llama_3s_scaling(tmp_path: Path) -> None:
    """The converter writes what the frequencies are divided by, in float32; from there on nothing is lost."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 10000.0,
    }  # fmt: skip
    folder = random_checkpoint(tmp_path / "folder", "llama", rope_parameters=scaling)
    config = Checkpoint.open(folder).decoder
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    divisors = (plain / inverse_frequencies(config.rope, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", folder, edit=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    rope = Checkpoint.open(path).decoder.rope
    np.testing.assert_array_equal(inverse_frequencies(rope, 64), plain / divisors.astype(np.float64))
    np.testing.assert_allclose(inverse_frequencies(rope, 64), inverse_frequencies(config.rope, 64), rtol=1e-7)


def test_a_sliding_window(tmp_path: Path, llama: Path) -> None:
    opened = Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=lambda w: w.add_sliding_window(100)))
    assert opened.decoder.max_context == 512 and opened.decoder.windows == (100, 100)


def without(key: str) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][key]

    return edit


def with_value(key: str, value: object, kind: gguf.GGUFValueType) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


U32, F32, STRING = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture", "llama.context_length", "llama.embedding_length", "llama.block_count",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model", "tokenizer.ggml.tokens",
    ],
)  # fmt: skip
def test_a_missing_key_is_named(tmp_path: Path, llama: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=without(key)))


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (with_value("general.architecture", "mamba", STRING), "one of llama, qwen2, qwen3, gemma"),
        (with_value("llama.block_count", 2**31 - 1, U32), "no more layers"),
        (with_value("llama.block_count", 3, U32), "no tensor blk.2"),
        (with_value("llama.block_count", "two", STRING), "'two'"),
        (with_value("llama.attention.head_count", 0, U32), "at least 1"),
        (with_value("llama.attention.head_count_kv", 3, U32), "a divisor"),
        (with_value("llama.attention.key_length", 62, U32), "multiple of 8"),
        (with_value("llama.attention.value_length", 32, U32), "the size of a head"),
        (with_value("llama.rope.dimension_count", 32, U32), "the size of a head"),
        (with_value("llama.embedding_length", 321, U32), "by the file's metadata"),
        (with_value("llama.vocab_size", 5, U32), "1003"),
        (with_value("llama.rope.freq_base", float("nan"), F32), "positive number"),
        (with_value("llama.rope.scaling.type", "ntk", STRING), "one of none, linear, yarn"),
        (with_value("llama.rope.scaling.factor", 0.5, F32), "at least 1"),
        (with_value("llama.rope.freq_base", 1e-300, gguf.GGUFValueType.FLOAT64), "float32 can hold"),
        (with_value("general.type", "adapter", STRING), "the model's own file"),
        (with_value("llama.attention.layer_norm_rms_epsilon", -1.0, F32), "positive number"),
        (with_value("llama.expert_count", 8, U32), "llama.expert_used_count is missing"),
        (with_value("split.count", 3, gguf.GGUFValueType.UINT16), "-00001-of-00003.gguf"),
        (with_value("tokenizer.ggml.eos_token_id", 5000, U32), "one of 1003 tokens"),
        (with_value("general.sampling.temp", -1.0, F32), "temperature is -1"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, llama: Path, edit: Edit, word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=edit))
    assert word in str(caught.value)


def test_a_key_that_llama_cpp_does_not_know_changes_nothing(tmp_path: Path, llama: Path) -> None:
    plain = Checkpoint.open(write_gguf(tmp_path / "plain.gguf", llama))
    edit = with_value("llama.atention.head_count", 8, U32)
    opened = Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=edit))
    (note,) = (n for n in opened.notes if n not in plain.notes)
    assert "llama.atention.head_count (did you mean llama.attention.head_count?)" in note
    assert replace(opened.decoder, notes=()) == replace(plain.decoder, notes=())


def test_values_that_change_nothing(tmp_path: Path, llama: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_uint32("general.quantization_version", 2)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_uint32("tokenizer.ggml.unknown_token_id2", 1)

    assert Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=edit)).notes == ()


@pytest.mark.parametrize(
    ("kind", "factor", "old", "expected"),
    [
        (None, None, None, 1), (None, 4.0, None, 4), (None, None, 2.0, 2), ("linear", 4.0, 2.0, 4),
        ("linear", None, 2.0, 2),
        ("none", 4.0, None, 1), ("none", None, 4.0, 1), ("linear", None, None, 1),
    ],
)  # fmt: skip
def test_scaling_of_positions_is_read_as_llama_cpp_reads_it(
    tmp_path: Path, llama: Path, kind: str | None, factor: float | None, old: float | None, expected: float
) -> None:
    """Without a type it is linear; a type of none turns off whatever else is there."""

    def edit(writer: gguf.GGUFWriter) -> None:
        if kind is not None:
            writer.add_string("llama.rope.scaling.type", kind)
        if factor is not None:
            writer.add_float32("llama.rope.scaling.factor", factor)
        if old is not None:
            writer.add_float32("llama.rope.scale_linear", old)

    rope = Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=edit)).decoder.rope
    assert (rope.factor if rope.kind == "linear" else 1) == expected


def test_sampling_defaults(tmp_path: Path, llama: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_int32("general.sampling.mirostat", 2)

    opened = Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, edit=edit))
    assert (opened.generation.temperature, opened.generation.top_k) == (0.7, 20)
    assert opened.notes == ("general.sampling.mirostat is not supported and not used",)
    assert json.loads(opened.files["generation_config.json"]) == {"temperature": 0.7, "top_k": 20}
    assert opened.generation.origin == ""


def test_a_file_without_sampling_settings_has_those_of_llama_cpp(tmp_path: Path, llama: Path) -> None:
    opened = Checkpoint.open(write_gguf(tmp_path / "plain.gguf", llama))
    expected = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert opened.generation.sampling == expected and opened.generation.origin == "llama.cpp"
    carried = read_generation(json.loads(opened.files["generation_config.json"]))
    assert (carried.sampling, carried.origin, carried.notes) == (expected, "llama.cpp", ())


def test_a_vocabulary_shorter_than_the_embedding(tmp_path: Path, llama: Path) -> None:
    opened = Checkpoint.open(write_gguf(tmp_path / "m.gguf", llama, tokenizer=lambda w: add_tokenizer(w, llama)))
    assert opened.decoder.vocab_size == 1003 and opened.tokenizer.vocab_size == 700
