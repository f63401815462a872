"""An open checkpoint: typed configuration, weights, tokenizer, chat template and generation defaults."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.chat.template_files import additional_templates, flatten, read_templates
from millrace.checkpoint.compressed.scheme import KEY as COMPRESSION
from millrace.checkpoint.config.config_reader import family_of
from millrace.checkpoint.config.encoder_config import EncoderConfig, read_encoder
from millrace.checkpoint.config.generation_config import GENERATION_CONFIG, GenerationDefaults, read_generation
from millrace.checkpoint.config.model_config import ModelConfig, read_config
from millrace.checkpoint.config.sentence_transformers import sentence_files, with_sentences
from millrace.checkpoint.files import Report, file_digest
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.checkpoint.quantization import open_tensors, read_quantization
from millrace.checkpoint.tokenizer.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Files,
    Tokenizer,
    read_files,
    read_json_object,
)
from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer
from millrace.checkpoint.weights.expert_stacks import split_expert_stacks
from millrace.checkpoint.weights.safetensors import FLOAT_NAMES, INDEX, DigestOf, Tensors
from millrace.checkpoint.weights.tied_head import resolve_tied_head
from millrace.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from millrace.checkpoint.gguf.model import GgufModel

CONFIG = "config.json"
NOT_FOLLOWED = "random weights do not follow config.json's quantization_config: name a precision, such as fp8"
# Files other than the weights that determine what a checkpoint computes.
SMALL_FILES = (CONFIG, INDEX, GENERATION_CONFIG, *TOKENIZER_FILES)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint. Weights are read on demand; the tokenizer and the template are opened on first use."""

    folder: Path  # for a GGUF checkpoint: the file
    config: ModelConfig | EncoderConfig
    tensors: Tensors
    generation: GenerationDefaults
    notes: tuple[str, ...]  # to be shown to the user

    # Whether every matrix is to be used in the precision that it is stored in; otherwise config.dtype applies to all.
    own_precisions = False

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Open a Hugging Face folder or GGUF file. raises CheckpointError if incomplete, damaged or unsupported"""
        return _open_gguf(path) if is_gguf(path) else _open_folder(path)

    @staticmethod
    def without_weights(folder: Path) -> "Checkpoint":
        """Open the configuration and tokenizer of a Hugging Face folder, whose weights may be missing. The quantization
        of weights is not read. raises like `open`, and ConfigError for a GGUF file"""
        if is_gguf(folder):
            raise ConfigError(
                "--random-weights is given for a GGUF file", "a folder with config.json and a tokenizer",
                "leave --random-weights out: the file has its weights",
            )  # fmt: skip
        raw = _read_raw(folder)
        notes = () if raw.pop(COMPRESSION, None) is None else (NOT_FOLLOWED,)
        fields = _config_fields(folder, raw)
        return Checkpoint(folder, fields.config, Tensors({}, {}), fields.generation, (*fields.notes, *notes))

    @property
    def decoder(self) -> ModelConfig:
        """Return the configuration of a decoder. raises CheckpointError for an encoder"""
        if isinstance(self.config, EncoderConfig):
            raise CheckpointError(
                f"{self.folder} is an encoder ({self.config.architecture})", "a model that gives tokens",
                "ask it for embeddings, or choose another model",
            )  # fmt: skip
        return self.config

    @cached_property
    def files(self) -> Files:
        """Return the files that are copied into an engine, so that it can be served without the checkpoint."""
        files = read_files(self.folder, (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES))
        return flatten(files | additional_templates(self.folder), self.folder)

    @property
    def has_tokenizer(self) -> bool:
        return TOKENIZER_JSON in self.files or TOKENIZER_MODEL in self.files

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer. raises CheckpointError if it is missing, damaged or belongs to another model

        It may have more tokens than the model (tokens that were added): callers must check ids before they reach a
        model.
        """
        return make_tokenizer(self.files, self.folder, self.config.vocab_size)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template; None if the checkpoint has none, as it is no chat model."""
        return _make_template(self.files, self.folder, self.tokenizer)

    @property
    def bos_token_id(self) -> int | None:
        """Return the id from config.json; None for an encoder."""
        return None if isinstance(self.config, EncoderConfig) else self.config.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids from generation_config.json if it has some, otherwise from config.json, and the tokenizer's
        own, like vLLM: a tuned model may end its turns with a token that only tokenizer_config.json names. () for an
        encoder."""
        if isinstance(self.config, EncoderConfig):
            return ()
        result = self.generation.eos_token_ids or self.config.eos_token_ids
        return with_tokenizers_own(result, self.tokenizer) if self.has_tokenizer else result

    def identity(self, digest_of: DigestOf = file_digest, report: Report | None = None) -> str:
        """Return 32 hexadecimal digits that are equal for checkpoints of equal content, whatever their paths and dates.

        Reads all weights, except files whose digest `digest_of` has cached. raises CheckpointError
        """
        small = read_files(self.folder, SMALL_FILES)  # none for a GGUF file, which contains everything
        if isinstance(self.config, EncoderConfig):
            small |= sentence_files(self.folder, self.config)
        small |= additional_templates(self.folder)
        return content_identity(self.tensors.digest(digest_of, report), small)


def with_tokenizers_own(eos_token_ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a text, with the tokenizer's own."""
    eos = tokenizer.eos_token_id
    return eos_token_ids if eos is None or eos in eos_token_ids else (*eos_token_ids, eos)


def content_identity(tensors_digest: str, files: Files) -> str:
    """Return 32 hexadecimal digits for the content of a checkpoint. files: those that decide what it does"""
    digest = hashlib.blake2b(tensors_digest.encode(), digest_size=16)
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class QuantizedCheckpoint(Checkpoint):
    """A folder of quantized matrices: compressed-tensors, GPTQ or AWQ."""

    own_precisions = True


@dataclass(frozen=True, eq=False)
class GgufCheckpoint(Checkpoint):
    """A GGUF file, with configuration, tokenizer, chat template and weights."""

    gguf: "GgufModel"

    own_precisions = True
    has_tokenizer = True  # checked when the file was opened

    @cached_property
    def files(self) -> Files:
        return self.gguf.files()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer. raises CheckpointError that names the GGUF file, not a file extracted from it"""
        try:
            return make_tokenizer(self.files, self.folder, self.config.vocab_size)
        except CheckpointError as error:
            what = error.what.replace(f"{self.folder}/", "")
            raise CheckpointError(
                f"{self.folder}: its tokenizer cannot be used: {what}", error.expected, "choose another file"
            ) from error

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.decoder.eos_token_ids


def _open_gguf(path: Path) -> GgufCheckpoint:
    # imported here: takes 10 ms, which a built engine should not wait for
    from millrace.checkpoint.gguf.model import read_gguf

    fields = read_gguf(path)
    return GgufCheckpoint(path, fields.config, fields.tensors, fields.generation, fields.notes, fields)


def _open_folder(folder: Path) -> Checkpoint:
    raw = _read_raw(folder)
    quantization = None if family_of(raw).is_encoder else read_quantization(raw.get(COMPRESSION), folder)
    if quantization:
        raw.pop(COMPRESSION, None)
    fields = _config_fields(folder, raw)
    config, notes = fields.config, fields.notes
    tensors = open_tensors(folder, quantization, config)
    if isinstance(config, ModelConfig):
        if type(tensors) is Tensors:
            tensors = split_expert_stacks(tensors, config)
        config, tensors, tied_notes = resolve_tied_head(config, tensors)
        notes += tied_notes
    stored = _stored_dtype(tensors)
    notes += tuple(tensors.notes)
    if not fields.has_dtype:
        config = replace(config, dtype=stored)
    elif stored != config.dtype:
        notes += (f"config.json says {config.dtype}, the weights are stored as {stored}",)
    kind = QuantizedCheckpoint if quantization else Checkpoint
    return kind(folder, config, tensors, fields.generation, notes)


@dataclass(frozen=True, slots=True)
class _ConfigFiles:
    """Contents of the configuration files. has_dtype: whether they name the type of the weights"""

    config: ModelConfig | EncoderConfig
    generation: GenerationDefaults
    has_dtype: bool

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.config.notes, *self.generation.notes)


def _read_raw(folder: Path) -> dict[str, object]:
    """Read config.json. raises CheckpointError"""
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}", "the folder of a checkpoint", "check the path")
    if not (folder / CONFIG).is_file():
        files = sorted(p.name for p in folder.glob("*.gguf"))
        if files:
            raise CheckpointError(
                f"{folder} has GGUF files but no {CONFIG}", "one file, or a checkpoint's folder",
                f"name the file: {folder / files[0]}",
            )  # fmt: skip
        raise CheckpointError(
            f"{folder} has no {CONFIG}", "the folder of a Hugging Face checkpoint", "name the folder that has it"
        )
    return read_json_object(folder / CONFIG)


def _config_fields(folder: Path, raw: dict[str, object]) -> _ConfigFiles:
    """Read the configuration files. raw: config.json without a known quantization_config. raises CheckpointError"""
    config = with_sentences(read_encoder(raw), folder) if family_of(raw).is_encoder else read_config(raw)
    generation = read_generation(read_json_object(folder / GENERATION_CONFIG))
    return _ConfigFiles(config, generation, any(raw.get(key) is not None for key in ("dtype", "torch_dtype")))


def _stored_dtype(tensors: Tensors) -> str:
    """Return the floating-point type of most bytes of the weights."""
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.nbytes if info.dtype in FLOAT_NAMES else 0
    return sizes.most_common(1)[0][0] if sizes.total() else "float32"


def open_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Open the chat template of a checkpoint or engine folder; None if it has none. raises CheckpointError"""
    files = read_files(folder, (TEMPLATE_FILE, TOKENIZER_CONFIG)) | additional_templates(folder)
    return _make_template(files, folder, tokenizer)


def _make_template(files: Files, where: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    sources = read_templates(files, where)
    return ChatTemplate(sources, tokenizer.special_token_strings) if sources else None
