"""A GGUF file as a checkpoint: one file with configuration, tokenizer, chat template and weights."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from millrace.checkpoint.config.config_writer import config_json
from millrace.checkpoint.config.generation_config import (
    GENERATION_CONFIG,
    LLAMA_CPP,
    GenerationDefaults,
    read_generation,
)
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.gguf.metadata import read_model
from millrace.checkpoint.gguf.metadata_keys import MetadataKeys, check_is_model
from millrace.checkpoint.gguf.split import open_parts
from millrace.checkpoint.gguf.tensors import GgufTensors
from millrace.checkpoint.gguf.vocabulary import read_specials, tokenizer_files
from millrace.checkpoint.tokenizer.tokenizer import Files
from millrace.errors import CheckpointError

_SAMPLING = "general.sampling."
# name in GenerationDefaults -> name in the file
_DEFAULTS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class GgufModel:
    """The contents of a GGUF file, from which a Checkpoint is made."""

    config: ModelConfig
    tensors: GgufTensors
    generation: GenerationDefaults
    notes: tuple[str, ...]
    keys: MetadataKeys

    def files(self) -> Files:
        """Return configuration, tokenizer and defaults in the form that Hugging Face folders have.

        They go into an engine's folder, so that transformers and tools based on it can read the tokenizer there.
        """
        plain = replace(self.config, rope=replace(self.config.rope, divisors=()))
        config = config_json(plain)
        if self.config.rope.divisors:  # frequencies that no config.json can describe
            del config["rope_parameters"]
        generation = json.dumps(_sampling(self.keys)).encode()
        return {"config.json": json.dumps(config).encode(), GENERATION_CONFIG: generation, **tokenizer_files(self.keys)}


def read_gguf(path: Path) -> GgufModel:
    """Read the header only. raises CheckpointError if the file is damaged, hostile or not supported"""
    file = open_parts(path)
    keys = MetadataKeys(path, file.metadata)
    check_is_model(keys)
    specials = read_specials(keys)
    config = read_model(file, specials.bos, specials.eos)
    outside = [i for i in (specials.bos, *specials.eos) if i is not None and i >= config.vocab_size]
    n_tokens = len(keys.texts("tokenizer.ggml.tokens"))
    if outside or n_tokens > config.vocab_size:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {n_tokens} tokens",
            f"at most {config.vocab_size}, the rows of token_embd.weight",
            "choose a file whose tokenizer belongs to its weights",
        )
    unused = sorted(k for k in keys.values if k.startswith(_SAMPLING) and k[len(_SAMPLING) :] not in _DEFAULTS.values())
    notes = (*config.notes, *specials.notes, *(f"{key} is not supported and not used" for key in unused))
    return GgufModel(config, GgufTensors.from_file(file, config), _generation(keys), notes, keys)


def _sampling(keys: MetadataKeys) -> dict[str, object]:
    """Return generation_config.json's equivalent: the file's own settings, or llama.cpp's defaults if it has none."""
    values = {ours: keys.values.get(_SAMPLING + theirs) for ours, theirs in _DEFAULTS.items()}
    fields: dict[str, object] = {
        ours: float(str(np.float32(value))) if isinstance(value, float) else value
        for ours, value in values.items()
        if value is not None
    }
    return fields or dict(LLAMA_CPP)


def _generation(keys: MetadataKeys) -> GenerationDefaults:
    try:
        return read_generation(_sampling(keys))
    except CheckpointError as error:
        message = error.what.removeprefix("generation_config.json: ")
        raise CheckpointError(f"{keys.path}: {_SAMPLING}*: {message}", error.expected, "choose another file") from error
