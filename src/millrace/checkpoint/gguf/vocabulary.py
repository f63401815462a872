"""Converts the tokenizer of a GGUF file to the small files of a Hugging Face folder, which an engine carries.

Two kinds: "gpt2", byte-level BPE with merges, with a pre-tokenizer that the file only names; and "llama",
SentencePiece's BPE with scores. If the file includes its original tokenizer.json, that is used.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.gguf.metadata_keys import MetadataKeys
from millrace.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from millrace.checkpoint.gguf.sentencepiece_model import UNKNOWN, UNUSED, VocabularyPiece, encode_model
from millrace.checkpoint.tokenizer.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENIZER_MODEL, parsed_json

ORIGINAL = "tokenizer.huggingface.json"
_NORMAL, _CONTROL, _USER, _BYTE = 1, 3, 4, 6  # types of tokens, as in SentencePiece; UNKNOWN, UNUSED
# Control tokens that end a turn, if the file names none. llama.cpp also recognizes them by these texts.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


_TEMPLATE = "tokenizer.chat_template"
_AROUND = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token")


@dataclass(frozen=True, slots=True)
class GgufSpecials:
    """The special tokens that the model's configuration needs. `notes` are shown to the user."""

    bos: int | None
    eos: tuple[int, ...]
    notes: tuple[str, ...]


def read_specials(keys: MetadataKeys) -> GgufSpecials:
    """Read the special tokens. raises CheckpointError"""
    tokens = keys.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise keys.wrong("tokenizer.ggml.tokens", "at least one token")
    spm = _kind(keys) == "llama"
    bos = keys.token("bos", len(tokens), 1 if spm else None)
    other_ends = [keys.token(name, len(tokens)) for name in ("eot", "eom")]
    eos = [i for i in (keys.token("eos", len(tokens), 2 if spm else None), *other_ends) if i is not None]
    types = _types(keys, tokens)
    result = [i for i, text in enumerate(tokens) if types[i] == _CONTROL and text in _ENDS and i not in eos]
    shown = ", ".join(tokens[i] for i in result)
    note = f"{shown} ends an answer too: the file does not say so, but the name does, and llama.cpp takes it so"
    notes = (note,) if result else ()
    return GgufSpecials(bos, tuple(dict.fromkeys([*eos, *result])), notes)


def tokenizer_files(keys: MetadataKeys) -> dict[str, bytes]:
    """tokenizer.json or tokenizer.model, and tokenizer_config.json with the chat template. raises CheckpointError"""
    tokens = keys.texts("tokenizer.ggml.tokens")
    types = _types(keys, tokens)
    ids = {
        "bos_token": read_specials(keys).bos,
        "eos_token": keys.token("eos", len(tokens), 2 if _kind(keys) == "llama" else None),
        "unk_token": keys.token("unknown", len(tokens)),
        "pad_token": keys.token("padding", len(tokens)),
    }
    config: dict[str, object] = {name: tokens[i] for name, i in ids.items() if i is not None}
    if templates := _templates(keys):
        config["chat_template"] = templates
    if ORIGINAL in keys.values:
        files = {TOKENIZER_JSON: _original(keys, tokens, ids)}
    elif _kind(keys) == "llama":
        files, more = _sentencepiece(keys, tokens, types, ids["unk_token"])
        config |= more
    else:
        files = {TOKENIZER_JSON: _byte_level(keys, tokens, types, ids)}
    is_json = TOKENIZER_JSON in files
    is_gemma = str(keys.values.get("general.architecture")).startswith("gemma")
    # transformers chooses its class for the tokenizer of an engine's folder by it
    config["tokenizer_class"] = (
        "PreTrainedTokenizerFast" if is_json else "GemmaTokenizer" if is_gemma else "LlamaTokenizer"
    )
    return {**files, TOKENIZER_CONFIG: json.dumps(config).encode()}


def _templates(keys: MetadataKeys) -> str | list[dict[str, str]] | None:
    """Return `tokenizer.chat_template`; if named templates exist, a list as in tokenizer_config.json.

    Named templates are `tokenizer.chat_template.NAME`; `tokenizer.chat_templates` only lists the names.
    """
    by_name = {"default": _TEMPLATE} if _TEMPLATE in keys.values else {}
    prefix = f"{_TEMPLATE}."
    by_name |= {key.removeprefix(prefix): key for key in keys.values if key.startswith(prefix)}
    if list(by_name) == ["default"] and by_name["default"] == _TEMPLATE:
        return keys.text(_TEMPLATE)
    return [{"name": name, "template": keys.text(key)} for name, key in by_name.items()] or None


def _kind(keys: MetadataKeys) -> str:
    kind = keys.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        expected = "gpt2 (byte-level BPE) or llama (SentencePiece)"
        raise keys.wrong("tokenizer.ggml.model", expected, "choose a model with one of these tokenizers")
    return kind


def _types(keys: MetadataKeys, tokens: list[str]) -> list[int]:
    """Return each token's type. Without types in the file, bytes are recognized by name, as in llama.cpp."""
    value, n_tokens = keys.values.get("tokenizer.ggml.token_type"), len(tokens)
    if value is None:
        byte_pattern = re.compile("<0x[0-9A-F]{2}>") if _kind(keys) == "llama" else None
        return [_BYTE if byte_pattern and byte_pattern.fullmatch(text) else _NORMAL for text in tokens]
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != n_tokens:
        raise keys.wrong("tokenizer.ggml.token_type", f"an array of {n_tokens} integers")
    types: list[int] = value.tolist()
    if not set(types) <= set(range(_NORMAL, _BYTE + 1)):
        raise keys.wrong("tokenizer.ggml.token_type", f"types from {_NORMAL} to {_BYTE}")
    return types


def _original(keys: MetadataKeys, tokens: list[str], ids: Mapping[str, int | None]) -> bytes:
    """Return the file's tokenizer.json, if its tokens match, with bos and eos as the file's flags require."""
    text = keys.text(ORIGINAL)
    try:
        raw = parsed_json(text)
    except (ValueError, RecursionError):
        raw = None
    model = raw.get("model") if isinstance(raw, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(raw, dict) or not isinstance(vocabulary, dict):
        raise keys.wrong(ORIGINAL, "a tokenizer.json with a vocabulary")
    for token, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < len(tokens) or tokens[i] != token:
            raise keys.wrong(ORIGINAL, f"the vocabulary of tokenizer.ggml.tokens, which lacks {token!r} as {i}")
    for i in _other_ids(raw):
        if type(i) is not int or not 0 <= i < len(tokens):
            raise keys.wrong(ORIGINAL, f"ids below {len(tokens)}, the number of tokens, which {i} is not")
    if keys.values.keys().isdisjoint(_AROUND):
        return text.encode()
    before = ids["bos_token"] if keys.boolean(_AROUND[0], True) else None
    after = ids["eos_token"] if keys.boolean(_AROUND[1], False) else None
    return json.dumps({**raw, "post_processor": _template(tokens, before, after)}, ensure_ascii=False).encode()


def _other_ids(raw: Mapping[str, object]) -> list[object]:
    """Return all ids that a tokenizer.json mentions outside its vocabulary."""
    added, processor = raw.get("added_tokens"), raw.get("post_processor")
    result = [token.get("id") for token in _dicts(added)]
    for part in (
        *_dicts([processor]),
        *(p for document in _dicts([processor]) for p in _dicts(document.get("processors"))),
    ):
        special = part.get("special_tokens")  # for some kinds a list that has only names
        for token in _dicts(list(special.values())) if isinstance(special, dict) else ():
            ids = token.get("ids")
            result += ids if isinstance(ids, list) else [ids]
    return result


def _dicts(value: object) -> list[dict[str, object]]:
    """Return the objects of a list; an empty list for other values."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _byte_level(keys: MetadataKeys, tokens: list[str], types: list[int], ids: Mapping[str, int | None]) -> bytes:
    """Return a tokenizer.json. It omits unused tokens: no text encodes to them, and they decode to no text."""
    name = keys.text("tokenizer.ggml.pre", "missing")
    if name not in PRE_TOKENIZERS:
        fix = f"a file with {ORIGINAL}, or one whose tokenizer.ggml.pre is known"
        raise keys.wrong("tokenizer.ggml.pre", "one of " + ", ".join(PRE_TOKENIZERS), fix)
    words = PRE_TOKENIZERS[name]
    vocabulary = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED}
    if len(vocabulary) != len(tokens) - types.count(UNUSED):
        raise keys.wrong("tokenizer.ggml.tokens", "each token once")
    added = [
        {"id": i, "content": text, "special": types[i] != _USER, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for text, i in vocabulary.items()
        if types[i] in (_CONTROL, _USER, UNKNOWN)
    ]  # fmt: skip
    cut = [] if words.pattern is None else [_split(words.pattern)]
    cut += [{"type": "Digits", "individual_digits": True}] if words.digits else []
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": words.pattern is None}
    before = ids["bos_token"] if keys.boolean(_AROUND[0], words.bos) else None
    after = ids["eos_token"] if keys.boolean(_AROUND[1], False) else None
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cut, {"type": "ByteLevel", **level}]},
        "post_processor": _template(tokens, before, after), "decoder": {"type": "ByteLevel", **level},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": words.whole_words, "vocab": vocabulary, "merges": _merges(keys),
        },
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False).encode()


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _template(tokens: list[str], before: int | None, after: int | None) -> dict[str, object] | None:
    """Return the post-processor that adds special tokens around a text."""
    around = [i for i in (before, after) if i is not None]
    if not around:
        return None

    def special_piece(i: int | None) -> list[dict[str, object]]:
        return [] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": 0}}]

    by_name = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in around}
    single = [*special_piece(before), {"Sequence": {"id": "A", "type_id": 0}}, *special_piece(after)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": by_name}


def _merges(keys: MetadataKeys) -> list[tuple[str, str]]:
    pairs = []
    for merge in keys.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)  # the first token has at least one character, which may be a space
        if not 0 < at < len(merge) - 1:
            raise keys.wrong("tokenizer.ggml.merges", f"two tokens with a space between them, which {merge!r} is not")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _sentencepiece(
    keys: MetadataKeys, tokens: list[str], types: list[int], unknown: int | None
) -> tuple[dict[str, bytes], dict[str, object]]:
    """Return a tokenizer.model, and the matching keys of tokenizer_config.json."""
    scores = keys.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(tokens):
        raise keys.wrong("tokenizer.ggml.scores", f"an array of {len(tokens)} numbers")
    if not (np.abs(scores) < np.finfo(np.float32).max).all():
        raise keys.wrong("tokenizer.ggml.scores", "finite numbers of float32")
    if keys.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise keys.wrong(
            "tokenizer.ggml.remove_extra_whitespaces", "false, as Llama's and Gemma's vocabularies have it"
        )
    prefix = keys.boolean("tokenizer.ggml.add_space_prefix", True)
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    pieces = [
        VocabularyPiece(text.replace(" ", "\u2581") if kind in (_NORMAL, _USER) else text, float(score), kind)
        for text, score, kind in zip(tokens, scores, types, strict=True)
    ]
    # only one can be unknown; SentencePiece would decode an unused one to its name, but it stands for no text
    pieces = [p._replace(type=_CONTROL) if p.type in (UNKNOWN, UNUSED) else p for p in pieces]
    pieces[unknown] = VocabularyPiece(tokens[unknown], 0.0, UNKNOWN)
    model = encode_model(pieces, byte_fallback=_BYTE in types, prefix=prefix)
    special = [text for text, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    # SentencePiece finds the others itself, after replacing spaces by its visible mark
    user = {str(i): {"content": tokens[i]} for i, kind in enumerate(types) if kind == _USER and prefix}
    config: dict[str, object] = {
        "additional_special_tokens": special, "added_tokens_decoder": user,
        "add_bos_token": keys.boolean(_AROUND[0], True),
        "add_eos_token": keys.boolean(_AROUND[1], False),
        "legacy": True,  # llama.cpp adds the dummy prefix to the text after every special token
    }  # fmt: skip
    return {TOKENIZER_MODEL: model}, config
