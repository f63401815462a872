"""SentencePiece's `tokenizer.model`, for checkpoints without a tokenizer.json (Llama 2, Mistral, Gemma)."""

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import sentencepiece

from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.checkpoint.tokenizer.tokenizer import AddedToken, SpecialTokens, TokenizerConfig, VocabularyTokenizer
from millrace.errors import CheckpointError
from millrace.machine.address_space import check_address_space
from millrace.protobuf import BYTES, WireError, fields

_MARK = "\u2581"  # SentencePiece's visible space
# ModelProto.normalizer_spec (3) { add_dummy_prefix (3): false }: appended to a model it overrides the model's own
# value, because protobuf merges a message that occurs twice and its last scalar wins.
_NO_PREFIX = b"\x1a\x02\x18\x00"
_SPECS = range(2, 6)  # fields of ModelProto that are messages, other than its many small pieces
_NORMALIZER, _CHARSMAP = 3, 2  # ModelProto.normalizer_spec.precompiled_charsmap
MAX_GROWTH = 1024  # maximum ratio of normalized to original bytes; published models stay below 100
# Address space that the library needs to read a file twice, per byte of it. Measured: 18 (256,000 pieces).
_ROOM_PER_BYTE = 60


class SentencePieceTokenizer(VocabularyTokenizer):
    """Encodes the text between special and added tokens with SentencePiece, like transformers' LlamaTokenizer.

    If `legacy` is true, the dummy prefix (a space) goes before each such segment, otherwise only before the first.
    """

    def __init__(self, data: bytes, path: Path, config: TokenizerConfig) -> None:
        """Load the tokenizer. data: the file's contents; path: for messages"""
        _check_fields(data, path)
        check_address_space(data, _ROOM_PER_BYTE, path)
        self._path = path
        self._model, self._inner = _open(data, path)
        size: int = self._model.get_piece_size()
        self._prefix = self._model.encode("a") != self._inner.encode("a")
        self._legacy = config.legacy
        pieces = _pieces(self._model, path)
        added = dict(config.added)
        named = _special_tokens(self._model, config)
        special_texts = {*named.values(), *config.special}
        bos, eos = (self._id(path, named, added, pieces, name) for name in ("bos_token", "eos_token"))
        self._added = {i: token for i, token in added.items() if i >= size or token.content not in pieces}
        self._split, self._ids, self._flags = _splitter(path, added, special_texts, pieces, config.split_special)
        ids = {i for i in range(size) if self._model.is_control(i) or self._model.is_unknown(i)}
        ids |= {i for text, i in self._ids.items() if text in special_texts}
        ids |= {i for i, token in added.items() if token.special}
        vocab_size = max([size - 1, *added]) + 1
        super().__init__(vocab_size, SpecialTokens(named=named, bos_token_id=bos, eos_token_id=eos, ids=frozenset(ids)))
        self._size = size
        self._token_ids = pieces | {token.content: i for i, token in self._added.items()}
        # defaults of LlamaTokenizer and GemmaTokenizer: a text begins with bos and has no eos
        self._before = [bos] if config.add_bos is not False and bos is not None else []
        self._after = [eos] if config.add_eos and eos is not None else []

    @staticmethod
    def _id(
        path: Path, named: dict[str, str], added: dict[int, AddedToken], pieces: dict[str, int], name: str
    ) -> int | None:
        text = named.get(name)
        if text is None:
            return None
        result = {token.content: i for i, token in added.items()}.get(text, pieces.get(text))
        if result is None:
            raise CheckpointError(
                f"tokenizer_config.json: {name} {text!r} is not in {path}",
                "a token of the vocabulary",
                "check that both files belong to the same model",
            )
        return result

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        at = 0
        starts = True  # whether the next segment gets the prefix: the first one, or every one (legacy)
        for match in self._split.finditer(text) if self._ids else ():
            flags = self._flags.get(match[0])
            before = text[at : match.start()]
            before = before.rstrip() if flags and flags.lstrip else before
            ids += self._stretch(before, starts)
            ids.append(self._ids[match[0]])
            at, starts = match.end(), self._legacy
            if flags and flags.rstrip:
                at += len(text[at:]) - len(text[at:].lstrip())
        ids += self._stretch(text[at:], starts)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    @property
    def pair_template(self) -> PairTemplate:
        raise CheckpointError(
            f"{self._path} does not say how two texts are joined", "a tokenizer.json, which has a post-processor",
            "save the tokenizer with a newer transformers",
        )  # fmt: skip

    @property
    def n_trained(self) -> int:
        return self._size

    @property
    def n_tokens(self) -> int:
        return self._size + sum(1 for i in self._added if i >= self._size)

    def ids(self) -> Iterable[int]:
        return chain(range(self._size), (i for i in self._added if i >= self._size))

    def token(self, token_id: int) -> str | None:
        if token_id in self._added:
            return self._added[token_id].content
        if not 0 <= token_id < self._size:
            return None
        piece: str = self._model.id_to_piece(token_id)
        return piece

    def token_id(self, token: str) -> int | None:
        return self._token_ids.get(token)

    def _stretch(self, text: str, starts: bool) -> list[int]:
        if not text:
            return []
        ids: list[int] = (self._model if starts else self._inner).encode(text)
        return ids

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self.token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode("utf-8")
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_MARK, " ").encode("utf-8")

    def _first_bytes(self, token_id: int) -> bytes:
        data = self._token_bytes(token_id)
        return data.removeprefix(b" ") if self._prefix else data


def _open(
    proto: bytes, path: Path
) -> tuple[sentencepiece.SentencePieceProcessor, sentencepiece.SentencePieceProcessor]:
    """Load the model twice: unchanged, and without its dummy prefix."""
    try:
        return (
            sentencepiece.SentencePieceProcessor(model_proto=proto),
            sentencepiece.SentencePieceProcessor(model_proto=proto + _NO_PREFIX),
        )
    except (RuntimeError, OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, str(error)) from error


def _check_fields(data: bytes, path: Path) -> None:
    """Refuse fields that exceed their message, and normalizers that expand texts too much, before the library loads."""
    try:
        for number, kind, _, begin, end in fields(data):
            if number not in _SPECS or kind != BYTES:
                continue
            for inner, its_kind, _, at, stop in fields(data, begin, end):
                is_charsmap = (number, inner, its_kind) == (_NORMALIZER, _CHARSMAP, BYTES)
                if is_charsmap and (n := longest_replacement(data[at:stop])) > MAX_GROWTH:
                    raise _unreadable(path, grows(n))
    except WireError:
        raise _unreadable(path, f"it is truncated or damaged: a field ends outside its {len(data)} bytes") from None


def longest_replacement(charsmap: bytes) -> int:
    """Return the length in bytes of the longest replacement text in a precompiled character map.

    Layout: 4 bytes for the trie's size in bytes, the trie, texts that end with 0. source: sentencepiece,
    src/normalizer.cc
    """
    size = int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[4 + size :].split(b"\0")))


def grows(growth: float) -> str:
    """Return the message for a normalizer that expands texts too much."""
    return f"its normalizer could make a text {growth:.3g} times as long, and {MAX_GROWTH} is the most"


def _pieces(model: sentencepiece.SentencePieceProcessor, path: Path) -> dict[str, int]:
    """Return ids by text. raises CheckpointError if a piece is not UTF-8; the library has checked everything else"""
    result: dict[str, int] = {}
    for i in range(model.get_piece_size()):
        try:
            result[model.id_to_piece(i)] = i
        except UnicodeDecodeError as error:
            raise _unreadable(path, f"token {i} is not UTF-8: {error}") from error
    return result


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {reason}", "a SentencePiece model", "download or copy the file again"
    )


def _special_tokens(model: sentencepiece.SentencePieceProcessor, config: TokenizerConfig) -> dict[str, str]:
    """Return the special tokens: tokenizer_config.json's, otherwise the model's own."""
    own = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    return {name: model.id_to_piece(i) for name, i in own.items() if i >= 0} | dict(config.named)


def _splitter(
    path: Path, added: dict[int, AddedToken], special: set[str], pieces: dict[str, int], split_special: bool
) -> tuple[re.Pattern[str], dict[str, int], dict[str, AddedToken]]:
    """Return a pattern that matches added tokens in a text, longest first; their ids; their handling of white space."""
    ids = {text: pieces[text] for text in special if text in pieces}
    flags: dict[str, AddedToken] = {}
    for i, token in added.items():
        if token.single_word:
            raise CheckpointError(
                f"{path.parent}: the added token {token.content!r} matches single words only",
                "single_word false",
                "convert the tokenizer to tokenizer.json with transformers, which reads such tokens",
            )
        ids[token.content] = i
        flags[token.content] = token
    if split_special:
        ids = {
            text: i for text, i in ids.items() if text not in special and not (text in flags and flags[text].special)
        }
    ids = {text: i for text, i in ids.items() if text}
    texts = sorted(ids, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, texts))), ids, flags
