"""Generation defaults: what is used, what is told, what is wrong."""

import pytest

from millrace.checkpoint.config.generation_config import GenerationDefaults, read_generation
from millrace.errors import CheckpointError

LLAMA_3 = {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6}
QWEN_25 = {"pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.1}


def test_published_files() -> None:
    llama = read_generation({**LLAMA_3, "top_p": 0.9, "transformers_version": "4.42.3"})
    assert llama == GenerationDefaults(temperature=0.6, top_p=0.9, eos_token_ids=(128001, 128008, 128009))
    qwen = read_generation({**QWEN_25, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
    assert qwen == GenerationDefaults(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, eos_token_ids=(151645, 151643)
    )


def test_greedy_is_temperature_zero_only_where_it_is_said() -> None:
    assert read_generation({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert read_generation({"temperature": 0.6}).temperature == 0.6
    assert read_generation({}) == GenerationDefaults()


def test_what_transformers_writes_by_default_is_quiet() -> None:
    import transformers

    config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2)
    assert read_generation(config.to_dict()).notes == ()


def test_what_is_not_supported_is_told() -> None:
    notes = read_generation({"num_beams": 4, "suppress_tokens": [1], "sparkle": 3, "length_penalty": 1.0}).notes
    assert len(notes) == 3
    assert "num_beams = 4" in notes[0] and "suppress_tokens" in notes[1] and "sparkle" in notes[2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 10**400),
        ("temperature", -(10**400)),
        ("temperature", float("inf")),
        ("temperature", [[]]),
        ("do_sample", []),
        ("eos_token_id", [[1]]),
        ("top_k", -(10**400)),
        ("top_k", 2**31),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, -1]),
    ],
)
def test_wrong_values_are_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_generation({key: value})
    assert key in caught.value.what and "generation_config.json" in caught.value.what
