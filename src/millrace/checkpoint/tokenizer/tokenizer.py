"""Tokenizers: one interface for `tokenizer.json` and SentencePiece's `tokenizer.model`.

Decoding is defined by bytes: every token contributes bytes, which are concatenated and decoded as UTF-8; invalid UTF-8
becomes U+FFFD. For byte-level vocabularies this is exactly the tokenizers library's result. For byte fallback
(`<0xNN>`) it differs only in runs that are not UTF-8, in which the library also drops the valid characters.

Encoding maps the text of a special token to that token, as in transformers by default: a user who writes `</s>` in a
chat message sends the token. This is the checkpoint's convention, and its chat template relies on it.
"""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from millrace.checkpoint.files import read_small
from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.errors import CheckpointError, RequestError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
SENTENCE_CONFIG = "sentence_bert_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# The files of a tokenizer and a chat template; an engine folder carries copies of those that exist.
TOKENIZER_FILES = (
    TOKENIZER_JSON, TOKENIZER_MODEL, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE_FILE,
    SENTENCE_CONFIG,
)  # fmt: skip
_LAST_ID = 2**31 - 1
Files = Mapping[str, bytes]  # contents of small files, by name
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a tokenizer."""

    named: Mapping[str, str]  # {"bos_token": "<s>", ...}: the variables of a chat template
    bos_token_id: int | None
    eos_token_id: int | None
    ids: frozenset[int]  # skipped when decoding with skip_special_tokens


def check_unicode(text: str) -> None:
    """Raise RequestError if `text` contains a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            "Unicode text",
            "send both halves of the surrogate pair, or leave the character out",
        ) from None


class Tokenizer(ABC):
    """Interface of tokenizers. Thread-safe."""

    def __init__(self, vocab_size: int, specials: SpecialTokens) -> None:
        self.vocab_size = vocab_size  # largest id + 1; the model's may be larger; those ids decode to nothing
        self.specials = specials
        self._bytes: dict[int, bytes] = {}

    @property
    def bos_token_id(self) -> int | None:
        return self.specials.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.specials.eos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self.specials.ids

    @property
    def special_token_strings(self) -> Mapping[str, str]:
        """Return `{"bos_token": "<s>", ...}`: the special tokens that the checkpoint names."""
        return self.specials.named

    @cached_property
    def special_around(self) -> tuple[int, int]:
        """Return how many special tokens encoding adds before a text, and how many after it."""
        bare, with_specials = self.encode("a", add_special_tokens=False), self.encode("a")
        n_special = len(with_specials) - len(bare)
        before = next((n for n in range(n_special + 1) if with_specials[n : n + len(bare)] == bare), n_special)
        return before, n_special - before

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. raises RequestError if `text` contains a lone surrogate, which UTF-8 cannot represent"""
        check_unicode(text)
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes that a token contributes to a text; b"" for an id without a token.

        first: as the first visible token; SentencePiece vocabularies drop the space that encoding added there
        """
        if first:
            return self._first_bytes(token_id)
        data = self._bytes.get(token_id)
        if data is None:
            data = self._token_bytes(token_id)
            if data:  # otherwise the cache could grow without bound with ids that have no token
                self._bytes[token_id] = data
        return data

    def ids(self) -> Iterable[int]:
        """Return the ids that have a token."""
        return range(self.vocab_size)

    def token_text(self, token_id: int) -> str:
        """Decode a single token; incomplete characters become U+FFFD (`token_bytes` returns the exact bytes)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _token_bytes(self, token_id: int) -> bytes: ...

    @abstractmethod
    def _first_bytes(self, token_id: int) -> bytes: ...


class VocabularyTokenizer(Tokenizer):
    """A checkpoint's tokenizer, which also gives access to its vocabulary."""

    @property
    @abstractmethod
    def n_trained(self) -> int:
        """Return the number of tokens of the trained vocabulary."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Return the number of tokens including added ones; less than `vocab_size` if some ids are unused."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """Return a token as in the vocabulary (`\u2581the`, `\u0120the`, `<0x0A>`); None if the id has no token."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary, or None."""

    @property
    @abstractmethod
    def pair_template(self) -> PairTemplate:
        """How two texts are joined for a cross-encoder. raises CheckpointError if the tokenizer cannot join any"""


class Detokenizer:
    """Decodes a stream of token ids incrementally, in constant time per token.

    The concatenated results of `push` and `flush` equal `decode` of all ids pushed; after a `prompt` they equal what
    these ids add to the prompt's text. A character is returned only when its last byte has arrived.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] | None = ()
    ) -> None:
        """prompt: the tokens that the text continues; None: a prompt without tokens"""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._first = prompt is not None and not any(True for _ in self._visible(prompt))
        self._unfinished = b""  # the first bytes of an incomplete character
        self._decode(self._tail(prompt or ()))

    def push(self, ids: Sequence[int]) -> str:
        """Return the characters that `ids` complete."""
        parts = []
        for i in map(int, ids):
            if i not in self._skip and (data := self._tokenizer.token_bytes(i)):
                parts.append(self._tokenizer.token_bytes(i, first=True) if self._first else data)
                self._first = False
        return self._decode(b"".join(parts))

    def flush(self) -> str:
        """Return the remaining text at the end: U+FFFD for an incomplete character, or nothing."""
        return self._decode(b"", final=True)

    def _decode(self, new: bytes, final: bool = False) -> str:
        data = self._unfinished + new
        text, n_read = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[n_read:]
        return text

    def _visible(self, ids: Iterable[int]) -> Iterator[int]:
        return (i for i in map(int, ids) if i not in self._skip and self._tokenizer.token_bytes(i))

    def _tail(self, prompt: Sequence[int]) -> bytes:
        """Return the prompt's last bytes, enough to include an incomplete character at its end (at most 3 bytes)."""
        data = b""
        for i in self._visible(reversed(prompt)):
            data = self._tokenizer.token_bytes(i) + data
            if len(data) >= 4:
                break
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """tokenizer_config.json, merged with the older files special_tokens_map.json and added_tokens.json."""

    named: Mapping[str, str]  # {"bos_token": "<s>", ...}
    special: tuple[str, ...]  # other special tokens
    added: Mapping[int, "AddedToken"]  # id -> token
    add_bos: bool | None  # None: not set
    add_eos: bool | None
    legacy: bool  # SentencePiece: add a space before the text after every special token
    split_special: bool  # encode the text of a special token as ordinary text
    bert: Mapping[str, object]  # BertTokenizer's options for its normalizer, by the library's names
    lowercase: bool  # sentence-transformers' setting: lowercase all texts, whatever the tokenizer does


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the trained vocabulary; `lstrip`, `rstrip`: it includes white space before or after it."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def read_tokenizer_config(files: Files, folder: Path) -> TokenizerConfig:
    raw = json_object(files, TOKENIZER_CONFIG, folder)
    # older checkpoints have special and added tokens in separate files
    both = {**json_object(files, SPECIAL_TOKENS_MAP, folder), **{k: v for k, v in raw.items() if v is not None}}
    named = {key: text for key in NAMED_TOKENS if (text := _content(folder, key, both.get(key))) is not None}
    extra = both.get("additional_special_tokens") or both.get("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    special = tuple(text for v in values if (text := _content(folder, "additional_special_tokens", v)) is not None)
    added: dict[int, AddedToken] = {}
    for text, i in json_object(files, ADDED_TOKENS, folder).items():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _LAST_ID:
            raise CheckpointError(f"{folder / ADDED_TOKENS}: {text!r} is {i!r}", "the id of a token", "correct the id")
        added[i] = AddedToken(text)
    decoder = raw.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        content = _content(folder, f"added_tokens_decoder[{key}]", value)
        if content is None or not (key.isdecimal() and len(key) <= 10 and int(key) <= _LAST_ID):
            raise _wrong(folder, f"added_tokens_decoder[{key}]", value)
        flags = value if isinstance(value, dict) else {}
        names = ("special", "lstrip", "rstrip", "single_word", "normalized")
        added[int(key)] = AddedToken(content, **{name: bool(flags.get(name)) for name in names})
    return TokenizerConfig(
        named=named,
        special=special,
        added=added,
        add_bos=bool(raw["add_bos_token"]) if "add_bos_token" in raw else None,
        add_eos=bool(raw["add_eos_token"]) if "add_eos_token" in raw else None,
        legacy=bool(raw.get("legacy")),
        split_special=bool(raw.get("split_special_tokens")),
        bert=_bert_options(raw),
        lowercase=bool(json_object(files, SENTENCE_CONFIG, folder).get("do_lower_case")),
    )


def _bert_options(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the normalizer's options, which override tokenizer.json's, as in transformers."""
    if raw.get("tokenizer_class") not in (None, "BertTokenizer", "BertTokenizerFast"):
        return {}
    names = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
    names["tokenize_chinese_chars"] = "handle_chinese_chars"
    return {ours: raw[key] for key, ours in names.items() if isinstance(raw.get(key), bool)}


def _content(folder: Path, key: str, value: object) -> str | None:
    """Return a token's text, which is stored as a string or as {"content": string, ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise _wrong(folder, key, value)


def _wrong(folder: Path, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{folder / TOKENIZER_CONFIG}: {key} is {value}", 'a string or {"content": string}', f"correct {key}"
    )


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read the files that exist. raises CheckpointError if one is implausibly large or unreadable"""
    return {name: read_small(folder / name) for name in names if (folder / name).is_file()}


def read_json_object(path: Path) -> dict[str, object]:
    """Read a file; {} if it does not exist. raises CheckpointError if it is not a JSON object"""
    return json_object(read_files(path.parent, [path.name]), path.name, path.parent)


def parsed_json(data: str | bytes) -> object:
    """Parse JSON. raises ValueError or RecursionError if it is not JSON in UTF-8, or contains a lone surrogate"""
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    raw: object = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(raw, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return raw


def json_object(files: Files, name: str, folder: Path) -> dict[str, object]:
    """Parse one of `files`; {} if it is not there. raises CheckpointError if it is not a JSON object"""
    path = folder / name
    if name not in files:
        return {}
    try:
        raw = parsed_json(files[name])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON: {error}", "a JSON object", "download or copy the file again"
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object", "{...}", "download or copy the file again")
    return raw
