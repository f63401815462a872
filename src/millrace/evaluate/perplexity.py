"""Perplexity of a text, in the three definitions of published figures, which are not comparable with each other.

`gptq`: as in GPTQ's and most papers on compression. Lines (blank ones empty) joined by two newlines; encoded as one
text, so with at most one BOS; windows of 2,048 tokens that do not overlap; the tail is dropped.
`llama-perplexity`: windows of 512 tokens of the unchanged file, each with a BOS; the second half is scored.
`lm-eval`: lm-evaluation-harness' task wikitext. Each page, without the spaces of the dataset's tokenizer, follows a
prefix token (BOS, otherwise EOS), in windows of the context length; every token is predicted. The result is per word
and byte of the original page.
sources: https://github.com/IST-DASLab/gptq, https://github.com/ggml-org/llama.cpp/tree/master/tools/perplexity,
https://github.com/EleutherAI/lm-evaluation-harness/tree/main/lm_eval/tasks/wikitext
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.settings import Progress
from millrace.engine.executor import IntArray
from millrace.errors import ConfigError
from millrace.evaluate.divergence import Mean, StepRunner, losses
from millrace.evaluate.resumable_results import Key, ResumableResults
from millrace.evaluate.sizes import LENGTH, SHORTEST
from millrace.evaluate.text_windows import windows_of

GPTQ, LLAMA_PERPLEXITY, LM_EVAL = "gptq", "llama-perplexity", "lm-eval"
DEFINITIONS = (GPTQ, LLAMA_PERPLEXITY, LM_EVAL)
_GPTQ_LENGTH = 2048
_WORDS = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Tokens to process at once: those after position `first` are predicted, each from all before it."""

    ids: IntArray
    first: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A window, or a document in parts; n_words, n_bytes: of the original document."""

    parts: Sequence[WindowPart]
    n_words: int = 0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WindowedText:
    """A text split as by a definition. window: tokens per window; bos: how texts begin, for users"""

    definition: str
    window: int
    bos: str
    units: Sequence[Unit]

    @property
    def name(self) -> str:
        return f"wikitext, {self.definition}, window {self.window}, BOS {self.bos}"

    @property
    def unit(self) -> str:
        return "documents" if self.definition == LM_EVAL else "windows"


class Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sums over a window or document: predicted tokens, their losses in nats, and squared losses."""

    number: int
    n: int
    loss: float
    squares: float
    n_words: int = 0
    n_bytes: int = 0

    @property
    def key(self) -> Key:
        return "", self.number


def cut(definition: str, text: str, tokenizer: Tokenizer, window: int | None, context: int) -> WindowedText:
    """Split a text into units. window: None for the definition's length, or the context if shorter

    raises ConfigError if the window exceeds the context, or the text is shorter than a window
    """
    usual = {GPTQ: _GPTQ_LENGTH, LLAMA_PERPLEXITY: LENGTH, LM_EVAL: context}[definition]
    length = window_of(window, usual, context)
    return _CUTS[definition](text, tokenizer, length)


def window_of(requested: int | None, default: int, context: int) -> int:
    """Return the window length. raises ConfigError if the requested one exceeds the context"""
    if context < SHORTEST:
        raise ConfigError(
            f"a context of {context} tokens is too short for perplexities", f"at least {SHORTEST}",
            "build for a longer --max-context",
        )  # fmt: skip
    if requested is not None and requested > context:
        raise ConfigError(
            f"--window {requested} is longer than the engine's context", f"at most {context} tokens",
            "choose a shorter one, or build for a longer --max-context",
        )  # fmt: skip
    return requested or min(default, context)


def measure(
    executor: StepRunner, text: WindowedText, limit: int | None, results: ResumableResults[Sums], progress: Progress
) -> list[Sums]:
    """Measure the first `limit` units; runs the model on those that the results lack.

    raises RequestError and MachineError as `losses`
    """
    units = text.units[:limit]
    for number, unit in enumerate(units):
        progress(f"reading {text.unit}", number, len(units))
        if ("", number) not in results.records:
            sums = np.concatenate([np.zeros(0), *(losses(executor, part.ids, part.first) for part in unit.parts)])
            squares = float(np.square(sums).sum())
            results.add(Sums(number, len(sums), float(sums.sum()), squares, unit.n_words, unit.n_bytes))
    progress(f"reading {text.unit}", len(units), len(units))
    return [results.records["", number] for number in range(len(units))]


def perplexities(definition: str, sums: Sequence[Sums]) -> Mapping[str, Mean]:
    """Return perplexities by name. The error is over tokens like llama-perplexity's; over documents if per word."""
    if definition == LM_EVAL:
        per_word, per_byte = (_ratio(sums, size) for size in (lambda s: s.n_words, lambda s: s.n_bytes))
        bits = per_byte.through(per_byte.value / np.log(2), 1 / np.log(2))
        return {"word perplexity": per_word.exp(), "byte perplexity": per_byte.exp(), "bits per byte": bits}
    n, loss, squares = (sum(getattr(s, name) for s in sums) for name in ("n", "loss", "squares"))
    mean = loss / n
    error = float(np.sqrt(max(squares / n - mean * mean, 0) / (n - 1))) if n > 1 else None
    return {"perplexity": Mean(mean, error).exp()}


def _ratio(sums: Sequence[Sums], size: Callable[[Sums], int]) -> Mean:
    """Return total loss / total size, with the standard error of a ratio of sums over documents."""
    sizes, loss = np.array([size(s) for s in sums], np.float64), np.array([s.loss for s in sums])
    n, ratio = len(sums), float(loss.sum() / sizes.sum())
    if n < 2:
        return Mean(ratio, None)
    left = np.square(loss - ratio * sizes).sum()
    return Mean(ratio, float(np.sqrt(left * n / (n - 1)) / sizes.sum()))


def _as_gptq(text: str, tokenizer: Tokenizer, length: int) -> WindowedText:
    rows = [line if line.strip() else "" for line in io.StringIO(text, newline="\n")]
    ids = np.asarray(tokenizer.encode("\n\n".join(rows)), np.int32)
    sums = len(ids) // length
    if not sums:
        raise _too_short(len(ids), length)
    units = [Unit([WindowPart(window, 0)]) for window in ids[: sums * length].reshape(-1, length)]
    return WindowedText(GPTQ, length, "once, before the text" if tokenizer.special_around[0] else "none", units)


def _as_llama_perplexity(text: str, tokenizer: Tokenizer, length: int) -> WindowedText:
    ids = tokenizer.encode(text)
    if len(ids) < length:
        raise _too_short(len(ids), length)
    sums = windows_of(tokenizer, ids, length)
    bos = "at each window" if tokenizer.special_around[0] else "none"
    return WindowedText(LLAMA_PERPLEXITY, length, bos, [Unit([WindowPart(window, sums.first)]) for window in sums.ids])


def _as_lm_eval(text: str, tokenizer: Tokenizer, length: int) -> WindowedText:
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise ConfigError(
            f"this model has neither a BOS nor an EOS, from which {LM_EVAL} reads a document", "one of them",
            f"choose another definition: --definition {GPTQ}",
        )  # fmt: skip
    units = [
        Unit(
            rolling(tokenizer.encode(detokenised(page), add_special_tokens=False), begin, length),
            len(_WORDS.split(page)), len(page.encode()),
        )
        for page in pages(text)
    ]  # fmt: skip
    return WindowedText(
        LM_EVAL, length, "before each document" if tokenizer.bos_token_id is not None else "none: EOS", units
    )


_CUTS: Mapping[str, Callable[[str, Tokenizer, int], WindowedText]] = {
    GPTQ: _as_gptq, LLAMA_PERPLEXITY: _as_llama_perplexity, LM_EVAL: _as_lm_eval,
}  # fmt: skip


def _too_short(n: int, length: int) -> ConfigError:
    return ConfigError(
        f"the text has {n:,} tokens of this model", f"at least {length:,}, one window",
        "give a longer text, or a shorter --window",
    )  # fmt: skip


def rolling(ids: Sequence[int], begin: int, length: int) -> list[WindowPart]:
    """Split tokens into windows of `length` that predict every token once.

    Each window begins with the last token of the previous one; the last window extends backward to full length, for
    context.
    """
    sequence = np.asarray([begin, *ids], np.int32)
    ends = [*range(min(length, len(ids)), len(ids), length), len(ids)] if len(ids) else []
    done, parts = 0, []
    for end in ends:
        start = max(0, end - length)
        parts.append(WindowPart(sequence[start : end + 1], done - start))
        done = end
    return parts


def pages(text: str) -> Iterator[str]:
    """Yield the dataset's pages; each begins with a first-level title (= Name =)."""
    paragraph: list[str] = []
    for line in text.split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" ="):
            page = "\n".join(paragraph)
            if page.strip():
                yield page
            paragraph = []
        paragraph.append(line)
    yield "\n".join(paragraph)


_SPACED = (*((f" @{c}@ ", c) for c in "-,."), *((f" {c} ", f"{c} ") for c in ":;.!?,"))
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_REST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"),
    ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip
_SLASHED = re.compile(r"/' [0-9]/")


def detokenised(page: str) -> str:
    """Remove the spaces of the dataset's tokenizer, by exactly lm-eval's rules in their order."""
    page = _SLASHED.sub("/'[0-9]/", page.replace("s '", "s'"))  # a character class inserted as text, as in lm-eval
    page = _replaced(page, _SPACED)
    for opening, closing in _BRACKETS:
        page = _tightened(page, opening, closing)
    return _replaced(page, _REST)


def _replaced(text: str, rules: Sequence[tuple[str, str]]) -> str:
    for before, after in rules:
        text = text.replace(before, after)
    return text


def _tightened(text: str, opening: str, closing: str) -> str:
    """Strip white space inside brackets. A regular expression would scan to the end from each opening."""
    parts, at = list[str](), 0
    while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin + 1)) >= 0:
        parts += text[at : begin + 1], text[begin + 1 : end].strip(), closing
        at = end + 1
    return "".join([*parts, text[at:]])
