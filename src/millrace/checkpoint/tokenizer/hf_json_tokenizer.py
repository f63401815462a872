"""`tokenizer.json` through the tokenizers library: byte-level BPE, BPE or Unigram with byte fallback, and WordPiece."""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import normalizers

from millrace.checkpoint.tokenizer.pair_template import PairTemplate, pair_template
from millrace.checkpoint.tokenizer.sentencepiece_tokenizer import MAX_GROWTH, grows, longest_replacement
from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, TokenizerConfig, VocabularyTokenizer, check_unicode
from millrace.errors import CheckpointError
from millrace.machine.address_space import check_address_space

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer(VocabularyTokenizer):
    """A tokenizer.json. Encodes with the library; decodes by bytes (see `tokenizer.py`).

    The file's post-processor decides whether a text begins with bos. As in transformers 5, add_bos_token and
    add_eos_token of tokenizer_config.json have no effect; they apply to `tokenizer.model`.
    """

    def __init__(self, data: bytes, path: Path, config: TokenizerConfig) -> None:
        """Load the tokenizer. data: the file's contents; path: for messages"""
        _check_whole(data, path)
        _check_normalizer(data, path)
        _check_prefix(data, path)
        check_address_space(data, _ROOM_PER_BYTE, path)
        with _reported_failures(path):
            library = tokenizers.Tokenizer.from_buffer(data)
            library.no_truncation()  # set for training; a prompt is never truncated silently
            library.no_padding()
            _set_normaliser(library, config)
            library.encode_special_tokens = config.split_special
            _add_tokens(library, config)
        added = library.get_added_tokens_decoder()
        vocab_size = max(library.get_vocab().values(), default=-1) + 1
        bos, eos = (self._named_id(library, path, config, name) for name in ("bos_token", "eos_token"))
        ids = frozenset(i for i, token in added.items() if token.special)
        super().__init__(vocab_size, SpecialTokens(named=config.named, bos_token_id=bos, eos_token_id=eos, ids=ids))
        self._library, self._path = library, path
        self._decoding = _read_decoder(path, library)

    @staticmethod
    def _named_id(library: tokenizers.Tokenizer, path: Path, config: TokenizerConfig, name: str) -> int | None:
        text = config.named.get(name)
        result: int | None = None if text is None else library.token_to_id(text)
        if text is not None and result is None:
            raise CheckpointError(
                f"tokenizer_config.json: {name} {text!r} is not in {path}",
                "a token of the vocabulary",
                "check that both files belong to the same model",
            )
        return result

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # as a batch of one: `encode` holds the interpreter lock, for 0.1 s for a text of 100 KB
        with _reported_failures(self._path):
            ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    @property
    def pair_template(self) -> PairTemplate:
        with _reported_failures(self._path):
            pair = self._library.encode("a", "a")
        return pair_template(pair.ids, pair.type_ids, pair.sequence_ids, self._path)

    def _token_bytes(self, token_id: int) -> bytes:
        text = self.token(token_id)
        return b"" if text is None else self._decoding.to_bytes(text)

    def _first_bytes(self, token_id: int) -> bytes:
        text = self.token(token_id)
        return b"" if text is None else self._decoding.first_to_bytes(text)

    def ids(self) -> Iterable[int]:
        ids: Iterable[int] = self._library.get_vocab().values()
        return ids

    @property
    def n_trained(self) -> int:
        return int(self._library.get_vocab_size(with_added_tokens=False))

    @property
    def n_tokens(self) -> int:
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        check_unicode(token)
        result: int | None = self._library.token_to_id(token)
        return result

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < 2**32:  # otherwise the library raises OverflowError
            return None
        text: str | None = self._library.id_to_token(token_id)
        return text


@contextmanager
def _reported_failures(path: Path) -> Iterator[None]:
    """Convert the library's errors to CheckpointError: for a bad file it raises bare Exception or ValueError.

    On some files it panics; the panic's class is not an Exception and cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error) not in (Exception, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {reason}", "a tokenizer.json", "download or copy the file again")


class _Outline(msgspec.Struct):
    """The part of a tokenizer.json that is checked before the library reads it."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct):
    type: msgspec.Raw = msgspec.Raw(b"null")
    continuing_subword_prefix: msgspec.Raw = msgspec.Raw(b"null")


class _ModelOutline(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Address space that the library needs to read a file, per byte of the file. Measured: 17 (WordPiece), 21 (BPE),
# 67 (Unigram).
_ROOM_PER_BYTE = 100


def _check_whole(data: bytes, path: Path) -> None:
    """Refuse a file that is not JSON before the library allocates memory for the part that is."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except _NOT_JSON as error:
        raise _unreadable(path, f"it is not JSON: {error}") from error


def _check_prefix(data: bytes, path: Path) -> None:
    """Refuse a BPE with a prefix: the library slices merged tokens at its length, and aborts within a character."""
    try:
        model = msgspec.json.decode(data, type=_ModelOutline).model
        kind, prefix = msgspec.json.decode(model.type), msgspec.json.decode(model.continuing_subword_prefix)
    except _NOT_JSON:
        return  # the library will say where
    if prefix and kind in ("BPE", None):
        raise _unreadable(path, "its BPE has a continuing_subword_prefix, which no supported model has")


def _check_normalizer(data: bytes, path: Path) -> None:
    """Refuse a normalizer with damaged tables, or one that could expand a short text until memory runs out."""
    try:
        normalizer = msgspec.json.decode(msgspec.json.decode(data, type=_Outline).normalizer)
    except _NOT_JSON:
        return  # the library will say where
    _check_charsmaps(normalizer, path)
    if (growth := _growth(normalizer)) > MAX_GROWTH:
        raise _unreadable(path, grows(growth))


def _check_charsmaps(normalizer: Any, path: Path) -> None:
    """Check the table size that a SentencePiece normalizer declares: the library allocates it unchecked and may abort.

    Layout: 4 bytes for the table's size in bytes, the table, texts. source: sentencepiece, src/normalizer.cc
    """
    pending = [normalizer]
    while pending:
        value = pending.pop()
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        text = value.get("precompiled_charsmap") if isinstance(value, dict) else None
        if isinstance(text, str):
            try:
                charsmap = base64.b64decode(text)
            except ValueError as error:
                raise _unreadable(path, f"its precompiled_charsmap is not base64: {error}") from error
            size = int.from_bytes(charsmap[:4], "little")
            if len(charsmap) < 4 or size > len(charsmap) - 4:
                raise _unreadable(path, f"its precompiled_charsmap of {len(charsmap)} bytes has a table of {size}")


def _growth(normalizer: Any) -> float:
    """Return the maximum ratio of normalized to original bytes; text that is added once counts as if added per byte."""
    if not isinstance(normalizer, dict):
        return 1.0
    if isinstance(parts := normalizer.get("normalizers"), list):
        return math.prod(map(_growth, parts))
    if isinstance(charsmap := normalizer.get("precompiled_charsmap"), str):
        return longest_replacement(base64.b64decode(charsmap))
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if not isinstance(content, str):
        return 1.0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return max(1.0, len(content.encode()) / len(literal.encode()))
    return 1.0 + len(content.encode())  # a pattern may match the empty text before each byte


def _set_normaliser(library: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Apply other files' normalizer settings. source: transformers' BertTokenizer, sentence-transformers"""
    state = None if library.normalizer is None else json.loads(library.normalizer.__getstate__())
    if config.bert and state and state["type"] == "BertNormalizer":
        state = {**state, **config.bert}
        library.normalizer = normalizers.BertNormalizer(**{k: v for k, v in state.items() if k != "type"})
    if config.lowercase and not _lowers(state):
        library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [library.normalizer])])


def _lowers(state: Any) -> bool:
    if isinstance(state, dict):
        return state.get("type") == "Lowercase" or state.get("lowercase") is True or _lowers(list(state.values()))
    return isinstance(state, list) and any(map(_lowers, state))


def _add_tokens(library: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens of tokenizer_config.json; as in transformers, its special tokens override tokenizer.json."""
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    size, more = library.get_vocab_size(), dict[str, tokenizers.AddedToken]()
    for i, token in sorted(config.added.items()):
        token_id = library.token_to_id(token.content)
        new = token.content and token.content not in added and token.content not in more
        # the library assigns consecutive ids; a token that would get a different id than in the file is omitted
        if new and (token_id == i or (token_id is None and size == i)):
            flags = {
                name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            more[token.content] = tokenizers.AddedToken(token.content, **flags)
            size += token_id is None
    library.add_tokens(list(more.values()))  # all at once: each call processes all added tokens again
    special = [
        text for text in dict.fromkeys((*config.named.values(), *config.special))
        if library.token_to_id(text) is not None and not (text in added and added[text].special)
    ]  # fmt: skip
    library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])


# The replacements that the library's WordPiece decoder makes in each token, in its order.
_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The decoder of a tokenizer.json, reduced to its effect on a single token."""

    byte_level: bool = False  # every character of a token represents a byte (GPT-2's alphabet)
    byte_fallback: bool = False  # `<0xNN>` is a byte
    replace: tuple[tuple[str, str], ...] = ()
    strips_space: bool = False  # strip one space at the start of the text
    drops: str = ""  # a character to drop from the first token (Metaspace)
    pieces: str | None = None  # prefix of a token that continues a word (WordPiece)
    cleans: bool = False  # remove spaces before punctuation and English contractions (WordPiece)

    def to_bytes(self, text: str) -> bytes:
        if self.pieces is not None:
            prefixed = text.removeprefix(self.pieces) if text.startswith(self.pieces) else f" {text}"
            return self._cleaned(prefixed).encode("utf-8")
        for old, new in self.replace:
            text = text.replace(old, new)
        if self.byte_level:
            table = _byte_alphabet()
            if all(c in table for c in text):
                return bytes(table[c] for c in text)
        if self.byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.encode("utf-8")

    def first_to_bytes(self, text: str) -> bytes:
        if self.pieces is not None:
            return self._cleaned(text).encode("utf-8")
        data = self.to_bytes(text.replace(self.drops, "") if self.drops else text)
        return data.removeprefix(b" ") if self.strips_space else data

    def _cleaned(self, text: str) -> str:
        for old, new in _CLEANED if self.cleans else ():
            text = text.replace(old, new)
        return text


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character -> byte. source: openai/gpt-2 `encoder.py`, bytes_to_unicode"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


def _read_decoder(path: Path, library: tokenizers.Tokenizer) -> _Decoding:
    raw = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [] if raw is None else raw["decoders"] if raw["type"] == "Sequence" else [raw]
    byte_level = byte_fallback = strips_space = False
    replace: list[tuple[str, str]] = []
    drops = ""
    if len(steps) == 1 and steps[0]["type"] == "WordPiece":
        return _Decoding(pieces=steps[0]["prefix"], cleans=steps[0]["cleanup"])
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips_space = start == 1
            case {"type": "Metaspace", "replacement": mark}:
                replace.append((mark, " "))
                drops = "" if step.get("prepend_scheme") == "never" else mark
            case _:
                raise _unsupported(path, json.dumps(step))
    if not steps:
        raise _unsupported(path, "null")
    return _Decoding(byte_level, byte_fallback, tuple(replace), strips_space, drops)


def _unsupported(path: Path, decoder: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the decoder {decoder} is not supported",
        "ByteLevel, or Metaspace, or WordPiece, or a sequence of Replace, ByteFallback, Fuse and Strip",
        "choose a checkpoint with a byte-level, SentencePiece-like or WordPiece tokenizer",
    )
