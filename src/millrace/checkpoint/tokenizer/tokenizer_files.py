"""Chooses the tokenizer for a folder's files. The library that reads them is imported only if needed."""

from pathlib import Path

from millrace.checkpoint.tokenizer.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Files,
    VocabularyTokenizer,
    read_files,
    read_tokenizer_config,
)
from millrace.errors import CheckpointError


def open_tokenizer(folder: Path, model_vocab_size: int | None = None) -> VocabularyTokenizer:
    """Open the tokenizer of a checkpoint or engine folder; tokenizer.json is preferred. raises CheckpointError"""
    return make_tokenizer(read_files(folder, TOKENIZER_FILES), folder, model_vocab_size)


def make_tokenizer(files: Files, where: Path, model_vocab_size: int | None = None) -> VocabularyTokenizer:
    """Create a tokenizer from the contents of its files, which need not be in a folder.

    where: for messages
    model_vocab_size: rows of the model's embedding, including padding; None: there is no model
    raises CheckpointError
    """
    tokenizer = _make(files, where)
    if model_vocab_size is not None:
        _check_ids(tokenizer, where, model_vocab_size)
    return tokenizer


def _check_ids(tokenizer: VocabularyTokenizer, where: Path, model_vocab_size: int) -> None:
    """Refuse ids beyond the model's vocabulary, except of added tokens: Gemma 3's tokenizer has one too many."""
    largest = tokenizer.vocab_size - 1
    if largest >= max(model_vocab_size, tokenizer.n_tokens):
        raise CheckpointError(
            f"{where}: the token {tokenizer.token(largest)!r:.60} has the id {largest}",
            f"ids below {model_vocab_size}, the model's vocabulary",
            "check that the tokenizer's files belong to the model, or correct the id",
        )


def _make(files: Files, where: Path) -> VocabularyTokenizer:
    config = read_tokenizer_config(files, where)
    if TOKENIZER_JSON in files:
        from millrace.checkpoint.tokenizer.hf_json_tokenizer import JsonTokenizer

        return JsonTokenizer(files[TOKENIZER_JSON], where / TOKENIZER_JSON, config)
    if TOKENIZER_MODEL in files:
        from millrace.checkpoint.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(files[TOKENIZER_MODEL], where / TOKENIZER_MODEL, config)
    raise no_tokenizer(where)


def no_tokenizer(folder: Path) -> CheckpointError:
    """Return the error for a checkpoint or engine without a tokenizer."""
    return CheckpointError(
        f"{folder} has no tokenizer", f"{TOKENIZER_JSON} or {TOKENIZER_MODEL} beside the weights",
        "copy the tokenizer's files of the original model into the checkpoint, and build again",
    )  # fmt: skip
