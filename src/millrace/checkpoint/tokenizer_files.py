"""Which tokenizer a folder's files make. The library that reads them is imported for those that need it."""

from pathlib import Path

from millrace.checkpoint.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Files,
    VocabularyTokenizer,
    read_files,
    read_tokenizer_config,
)
from millrace.errors import CheckpointError


def open_tokenizer(folder: Path) -> VocabularyTokenizer:
    """The tokenizer of a checkpoint or engine folder; tokenizer.json is preferred. raises CheckpointError"""
    return make_tokenizer(read_files(folder, TOKENIZER_FILES), folder)


def make_tokenizer(files: Files, where: Path) -> VocabularyTokenizer:
    """From the contents of its files, which need not lie in a folder; `where` is for messages."""
    config = read_tokenizer_config(files, where)
    if TOKENIZER_JSON in files:
        from millrace.checkpoint.tokenizer_json import JsonTokenizer

        return JsonTokenizer(files[TOKENIZER_JSON], where / TOKENIZER_JSON, config)
    if TOKENIZER_MODEL in files:
        from millrace.checkpoint.tokenizer_model import SentencePieceTokenizer

        return SentencePieceTokenizer(files[TOKENIZER_MODEL], where / TOKENIZER_MODEL, config)
    raise no_tokenizer(where)


def no_tokenizer(folder: Path) -> CheckpointError:
    """Of a checkpoint or an engine."""
    return CheckpointError(
        f"{folder} has no tokenizer", f"{TOKENIZER_JSON} or {TOKENIZER_MODEL} beside the weights",
        "copy the tokenizer's files of the original model into the checkpoint, and build again",
    )  # fmt: skip
