"""Text to token ids and back: one contract over `tokenizer.json` and SentencePiece's `tokenizer.model`.

Decoding is defined by bytes: every token contributes some, the bytes of a sequence are read as UTF-8, and what is not
UTF-8 becomes U+FFFD. For byte-level vocabularies that is what the tokenizers library does to the letter; for byte
fallback (`<0xNN>`) it differs only in runs that are not UTF-8, where the library drops the good characters as well.

Encoding reads the spelling of a special token inside a text as that token, as transformers does by default: a user who
writes `</s>` into a chat message sends the token. That is the checkpoint's convention (its chat template relies on it).
"""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from millrace.checkpoint.files import read_small
from millrace.errors import CheckpointError, RequestError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
SENTENCE_CONFIG = "sentence_bert_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# What a tokenizer and a chat template are read from: an engine folder carries copies of those that exist.
TOKENIZER_FILES = (
    TOKENIZER_JSON, TOKENIZER_MODEL, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE_FILE,
    SENTENCE_CONFIG,
)  # fmt: skip
_LAST_ID = 2**31 - 1
Files = Mapping[str, bytes]  # the contents of small files, by name
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Specials:
    """What a tokenizer knows of its special tokens."""

    named: Mapping[str, str]  # {"bos_token": "<s>", ...}: the variables of a chat template
    bos_token_id: int | None
    eos_token_id: int | None
    ids: frozenset[int]  # skipped when decoding with skip_special_tokens


def check_unicode(text: str) -> None:
    """raises RequestError where `text` holds half a surrogate pair"""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            "Unicode text",
            "send both halves of the surrogate pair, or leave the character out",
        ) from None


class Tokenizer(ABC):
    """Safe to use from several threads."""

    def __init__(self, vocab_size: int, specials: Specials) -> None:
        self.vocab_size = vocab_size  # largest id + 1; the model's may be larger, such ids contribute nothing
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
        """`{"bos_token": "<s>", ...}`, only those that the checkpoint names."""
        return self.specials.named

    @cached_property
    def special_around(self) -> tuple[int, int]:
        """How many special tokens encoding puts before a text, and how many behind it."""
        bare, with_specials = self.encode("a", add_special_tokens=False), self.encode("a")
        n_special = len(with_specials) - len(bare)
        before = next((n for n in range(n_special + 1) if with_specials[n : n + len(bare)] == bare), n_special)
        return before, n_special - before

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """raises RequestError where `text` holds half a surrogate pair, which no UTF-8 text can"""
        check_unicode(text)
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """What this token contributes to a text; an id without a token contributes nothing.

        first: as the first visible token, where SentencePiece's vocabularies drop the space that encoding put there
        """
        if first:
            return self._first_bytes(token_id)
        data = self._bytes.get(token_id)
        if data is None:
            data = self._token_bytes(token_id)
            if data:  # else anybody could ask for any number of ids that have no token
                self._bytes[token_id] = data
        return data

    def ids(self) -> Iterable[int]:
        """Those that have a token."""
        return range(self.vocab_size)

    def token_text(self, token_id: int) -> str:
        """A token alone; what is not a whole character in it is U+FFFD (`token_bytes` has it exactly)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _token_bytes(self, token_id: int) -> bytes: ...

    @abstractmethod
    def _first_bytes(self, token_id: int) -> bytes: ...


class VocabularyTokenizer(Tokenizer):
    """A checkpoint's own: its vocabulary can be asked, too."""

    @property
    @abstractmethod
    def n_trained(self) -> int:
        """Tokens of the vocabulary as it was trained."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """With those that were added; below `vocab_size` where ids are left free."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """As the vocabulary spells it (`\u2581the`, `\u0120the`, `<0x0A>`); None for an id without a token."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Of a token as the vocabulary spells it."""


class Detokenizer:
    """Token ids to text as they come, in constant time per token.

    The pushes and the flush, put together, are `decode` of all ids pushed; after a `prompt` they are what these ids add
    to the text of the prompt. A character is given out only when its last byte has come.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] | None = ()
    ) -> None:
        """prompt: the tokens that the text continues; None: it continues a prompt without tokens"""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._first = prompt is not None and not any(True for _ in self._visible(prompt))
        self._unfinished = b""  # the first bytes of a character
        self._decode(self._tail(prompt or ()))

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        parts = []
        for i in map(int, ids):
            if i not in self._skip and (data := self._tokenizer.token_bytes(i)):
                parts.append(self._tokenizer.token_bytes(i, first=True) if self._first else data)
                self._first = False
        return self._decode(b"".join(parts))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, or nothing."""
        return self._decode(b"", final=True)

    def _decode(self, new: bytes, final: bool = False) -> str:
        data = self._unfinished + new
        text, n_read = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[n_read:]
        return text

    def _visible(self, ids: Iterable[int]) -> Iterator[int]:
        return (i for i in map(int, ids) if i not in self._skip and self._tokenizer.token_bytes(i))

    def _tail(self, prompt: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold a character that it leaves unfinished (at most 3 bytes)."""
        data = b""
        for i in self._visible(reversed(prompt)):
            data = self._tokenizer.token_bytes(i) + data
            if len(data) >= 4:
                break
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """tokenizer_config.json with its older companions special_tokens_map.json and added_tokens.json."""

    named: Mapping[str, str]  # {"bos_token": "<s>", ...}
    special: tuple[str, ...]  # further special tokens
    added: Mapping[int, "Added"]  # id -> token
    add_bos: bool | None  # None: not said
    add_eos: bool | None
    legacy: bool  # SentencePiece: a space is put in front of the text after every special token
    split_special: bool  # the spelling of a special token is ordinary text
    bert: Mapping[str, object]  # what BertTokenizer's file says of its normaliser, by the library's names
    lowercase: bool  # an encoder of sentences reads all texts so, whatever the tokenizer does


@dataclass(frozen=True, slots=True)
class Added:
    """A token outside the trained vocabulary; `lstrip`, `rstrip`: it swallows white space before or after itself."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def read_tokenizer_config(files: Files, folder: Path) -> TokenizerConfig:
    raw = json_object(files, TOKENIZER_CONFIG, folder)
    # older checkpoints keep the names of the special tokens, and the added ones, in files of their own
    both = {**json_object(files, SPECIAL_TOKENS_MAP, folder), **{k: v for k, v in raw.items() if v is not None}}
    named = {key: text for key in NAMED_TOKENS if (text := _content(folder, key, both.get(key))) is not None}
    extra = both.get("additional_special_tokens") or both.get("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    special = tuple(text for v in values if (text := _content(folder, "additional_special_tokens", v)) is not None)
    added: dict[int, Added] = {}
    for text, i in json_object(files, ADDED_TOKENS, folder).items():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _LAST_ID:
            raise CheckpointError(f"{folder / ADDED_TOKENS}: {text!r} is {i!r}", "the id of a token", "correct the id")
        added[i] = Added(text)
    decoder = raw.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        content = _content(folder, f"added_tokens_decoder[{key}]", value)
        if content is None or not (key.isdecimal() and len(key) <= 10 and int(key) <= _LAST_ID):
            raise _wrong(folder, f"added_tokens_decoder[{key}]", value)
        flags = value if isinstance(value, dict) else {}
        names = ("special", "lstrip", "rstrip", "single_word", "normalized")
        added[int(key)] = Added(content, **{name: bool(flags.get(name)) for name in names})
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
    """They win over tokenizer.json's, as in transformers, which makes a normaliser of them."""
    if raw.get("tokenizer_class") not in (None, "BertTokenizer", "BertTokenizerFast"):
        return {}
    names = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
    names["tokenize_chinese_chars"] = "handle_chinese_chars"
    return {ours: raw[key] for key, ours in names.items() if isinstance(raw.get(key), bool)}


def _content(folder: Path, key: str, value: object) -> str | None:
    """A token is written as a string or as {"content": string, ...}."""
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
    """Those that exist. raises CheckpointError for one that is too large for what it is, or cannot be read"""
    return {name: read_small(folder / name) for name in names if (folder / name).is_file()}


def read_json_object(path: Path) -> dict[str, object]:
    """{} where there is no such file. raises CheckpointError where it is not a JSON object"""
    return json_object(read_files(path.parent, [path.name]), path.name, path.parent)


def parsed_json(data: str | bytes) -> object:
    """raises ValueError or RecursionError for what is not JSON in UTF-8, or has half a surrogate pair in a text"""
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    raw: object = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(raw, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return raw


def json_object(files: Files, name: str, folder: Path) -> dict[str, object]:
    """{} where there is no such file. raises CheckpointError where it is not a JSON object"""
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
