"""How texts are split into words before byte-level merging, by the name that GGUF files have for it.

sources: tokenizer.json of the models named below, and llama.cpp's table of names (src/llama-vocab.cpp)
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split into words before merging (pre-tokenization)."""

    pattern: str | None  # None: GPT-2's, which is built into the tokenizers library
    digits: bool = False  # every digit is a separate word
    nfc: bool = False  # texts are normalized first, as in the original tokenizers; llama.cpp does not
    whole_words: bool = False  # a word that is a token is not split, whatever the merges are
    bos: bool = False  # whether a text begins with bos, if the file does not set it


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(end: str, digits: str) -> str:
    """Return a pattern that splits before capital letters. end: of a word, after its letters"""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2, _DIGITS = PreTokenizer(None), PreTokenizer(None, digits=True)
_LLAMA3 = PreTokenizer(_CONTRACTIONS + r"|\p{N}{1,3}" + _REST, whole_words=True, bos=True)
_QWEN2 = PreTokenizer(_CONTRACTIONS + r"|\p{N}" + _REST, nfc=True)
_GPT4O = PreTokenizer(_cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"))
_TEKKEN = PreTokenizer(_cased("", r"\p{N}"), whole_words=True, bos=True)
# by tokenizer.ggml.pre
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.pattern),
    "dbrx": PreTokenizer(_LLAMA3.pattern),  # OLMo 2 and 3, Phi-4
    "chatglm-bpe": PreTokenizer(_LLAMA3.pattern),
    "glm4": PreTokenizer(_LLAMA3.pattern, whole_words=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "gpt-4o": _GPT4O,  # Phi-4-mini
    "tekken": _TEKKEN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,  # Granite
    "exaone": _DIGITS,
    "command-r": PreTokenizer(None, digits=True, nfc=True),
}
