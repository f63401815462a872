"""Which tokenizer a folder's files make. The library that reads them is imported for those that need it."""

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
    """The tokenizer of a checkpoint or engine folder; tokenizer.json is preferred. raises CheckpointError"""
    return make_tokenizer(read_files(folder, TOKENIZER_FILES), folder, model_vocab_size)


def make_tokenizer(files: Files, where: Path, model_vocab_size: int | None = None) -> VocabularyTokenizer:
    """From the contents of its files, which need not lie in a folder; `where` is for messages.

    model_vocab_size: of the model that reads its ids, with what its embeddings are padded to; None: nobody does
    raises CheckpointError
    """
    tokenizer = _make(files, where)
    if model_vocab_size is not None:
        _check_ids(tokenizer, where, model_vocab_size)
    return tokenizer


def _check_ids(tokenizer: VocabularyTokenizer, where: Path, model_vocab_size: int) -> None:
    """No id lies beyond the model, except where so many tokens were added: Gemma 3's has one more than its model."""
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
    """Of a checkpoint or an engine."""
    return CheckpointError(
        f"{folder} has no tokenizer", f"{TOKENIZER_JSON} or {TOKENIZER_MODEL} beside the weights",
        "copy the tokenizer's files of the original model into the checkpoint, and build again",
    )  # fmt: skip
