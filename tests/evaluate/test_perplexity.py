"""Perplexities against transformers' log probabilities in float64, summed by hand as each definition has it."""

import io
import math
import re
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import ConfigError, MachineError
from millrace.evaluate import perplexity
from millrace.evaluate.divergence import Mean, losses
from millrace.evaluate.perplexity import (
    GPTQ,
    LLAMA_PERPLEXITY,
    LM_EVAL,
    Sums,
    WindowedText,
    cut,
    detokenised,
    measure,
    pages,
    perplexities,
    rolling,
)  # fmt: skip
from millrace.evaluate.resumable_results import ResultsInputs, ResumableResults
from tests.support.engines import build

TINY = BUNDLED / "tiny"
LENGTH = 64
ABOUT = ResultsInputs("m", "engine", "fp32", "wikitext", "text")
TEXT = "".join(
    f" \n = The mill = \n \n The wheel of the mill turned {n} times , and a little dog ( called Lily ) sat by it . \n"
    " It said : \" come here \" ; and they did n't . \n = = By night = = \n The boys ' boat was @-@ near . \n"
    for n in ("two", "three", "many")
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(TINY).tokenizer


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeExecutor]:
    engine = build(TINY, tmp_path_factory.mktemp("e") / "e", "fp32")
    with closing(engine.executor(n_pages=2, threads=1)) as found:
        yield found


@pytest.fixture(scope="module")
def exact() -> Any:
    """(ids) -> log probabilities (n, vocabulary) in float64."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)

    @cache
    def of(ids: tuple[int, ...]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    return lambda ids: of(tuple(ids))


def found(executor: NativeExecutor, text: WindowedText, folder: Path, limit: int | None = None) -> list[Sums]:
    with closing(ResumableResults(folder / "kept", ABOUT, Sums)) as kept:
        return measure(executor, text, limit, kept, lambda *_: None)


def test_as_gptq(executor: NativeExecutor, tokenizer: Tokenizer, exact: Any, tmp_path: Path) -> None:
    rows = [line if line.strip() else "" for line in io.StringIO(TEXT)]
    ids, each = tokenizer.encode("\n\n".join(rows)), list[float]()
    assert ids[0] == tokenizer.bos_token_id and "\n\n\n\n" in "\n\n".join(rows)
    for begin in range(0, len(ids) - LENGTH + 1, LENGTH):
        window = ids[begin : begin + LENGTH]
        each += (-exact(window)[range(LENGTH - 1), window[1:]]).tolist()
    text = cut(GPTQ, TEXT, tokenizer, LENGTH, 128)
    sums = found(executor, text, tmp_path)
    assert len(sums) == len(ids) // LENGTH >= 4 and sum(s.n for s in sums) == len(each)
    got = perplexities(GPTQ, sums)["perplexity"]
    value, error = np.exp(np.mean(each)), np.exp(np.mean(each)) * np.std(each, ddof=1) / math.sqrt(len(each))
    assert got == pytest.approx(Mean(value, error), rel=1e-5) and text.bos == "once, before the text"


def test_as_llama_perplexity(executor: NativeExecutor, tokenizer: Tokenizer, exact: Any, tmp_path: Path) -> None:
    ids, each = tokenizer.encode(TEXT), list[float]()
    for begin in range(0, len(ids) - LENGTH + 1, LENGTH):
        window = [tokenizer.bos_token_id or 0, *ids[begin + 1 : begin + LENGTH]]
        each += (-exact(window)[range(LENGTH // 2, LENGTH - 1), window[LENGTH // 2 + 1 :]]).tolist()
    sums = found(executor, cut(LLAMA_PERPLEXITY, TEXT, tokenizer, LENGTH, 128), tmp_path)
    assert sum(s.n for s in sums) == len(each) == len(sums) * (LENGTH // 2 - 1)
    error = np.sqrt((np.mean(np.square(each)) - np.mean(each) ** 2) / (len(each) - 1))  # as its source has it
    got = perplexities(LLAMA_PERPLEXITY, sums)["perplexity"]
    assert got == pytest.approx(Mean(np.exp(np.mean(each)), error * np.exp(np.mean(each))), rel=1e-5)


def test_as_lm_eval(executor: NativeExecutor, tokenizer: Tokenizer, exact: Any, tmp_path: Path) -> None:
    documents = []
    for page in pages(TEXT):
        ids = tokenizer.encode(by_expressions(page), add_special_tokens=False)
        whole, loss = [1, *ids], 0.0
        for i in range(len(ids)):  # a token has before it what its window has: LENGTH tokens at most
            window = i // LENGTH
            begin = window * LENGTH if (window + 1) * LENGTH <= len(ids) else max(0, len(ids) - LENGTH)
            loss -= exact(whole[begin : begin + LENGTH])[i - begin, ids[i]]
        documents.append((loss, len(re.split(r"\s+", page)), len(page.encode())))
    text = cut(LM_EVAL, TEXT, tokenizer, LENGTH, 128)
    sums = found(executor, text, tmp_path)
    assert [(s.n_words, s.n_bytes) for s in sums] == [d[1:] for d in documents] and len(documents) == 3
    assert sum(len(unit.parts) for unit in text.units) > 3, "some document has more than one window"
    loss, words, n_bytes = (sum(column) for column in zip(*documents, strict=True))
    got = {name: mean.value for name, mean in perplexities(LM_EVAL, sums).items()}
    assert got == pytest.approx({
        "word perplexity": math.exp(loss / words), "byte perplexity": math.exp(loss / n_bytes),
        "bits per byte": loss / n_bytes / math.log(2),
    }, rel=1e-5)  # fmt: skip


def test_the_error_of_a_ratio_is_that_of_documents_left_out() -> None:
    """Beside the jackknife, which needs no formula."""
    draw = np.random.default_rng(2)
    sums = [
        Sums(i, 9, float(draw.normal(9, 0.6) * w), 1.0, w, 6 * w) for i, w in enumerate(draw.integers(90, 110, 400))
    ]

    def bits(some: list[Sums]) -> float:
        return sum(s.loss for s in some) / sum(s.n_bytes for s in some) / math.log(2)

    left_out = np.array([bits(sums[:i] + sums[i + 1 :]) for i in range(400)])
    error = math.sqrt(399 / 400 * np.square(left_out - left_out.mean()).sum())
    got = perplexities(LM_EVAL, sums)["bits per byte"]
    assert got == pytest.approx(Mean(bits(sums), error), rel=0.01)
    assert perplexities(LM_EVAL, sums[:1])["word perplexity"].error is None
    assert perplexities(LM_EVAL, [Sums(0, 9, 9e5, 1.0, 1, 9)])["word perplexity"] == (math.inf, None)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 15, 16, 17, 40])
def test_rolling_windows(n: int) -> None:
    """Each token once, from the begin token or what is before it; none is longer than a window, all but the last begin
    with the token before."""
    ids = list(range(100, 100 + n))
    parts = rolling(ids, 1, 8)
    assert [token for part in parts for token in part.ids[part.first + 1 :].tolist()] == ids
    assert all(len(part.ids) <= 8 + 1 for part in parts) and [part.first for part in parts[:-1]] == [0] * (
        len(parts) - 1
    )
    assert all(part.ids.tolist() in ([*([1, *ids][at : at + len(part.ids)])] for at in range(n + 1)) for part in parts)
    assert not parts or len(parts[-1].ids) == min(n, 8) + 1, "the last one has all the context that there is room for"


def by_expressions(text: str) -> str:
    """lm-eval's rules, as expressions."""
    for pattern, to in (
        (r"s '", "s'"), (r"/' [0-9]/", "/'[0-9]/"), (r" @(-|,|\.)@ ", r"\1"), (" : ", ": "), (" ; ", "; "),
        (r" \. ", ". "), (" ! ", "! "), (r" \? ", "? "), (" , ", ", "), (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"), (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"), ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"),
        (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
    ):  # fmt: skip
        text = re.sub(pattern, to, text)
    return text


def test_detokenised_by_its_rules() -> None:
    draw = np.random.default_rng(7)
    marks = [*"()[]{}\"'.,;:!?=° \n\t\u2003sN5/x", " @-@ ", " @,@ ", " 's ", "s '", "/' 5/", " = = ", "\u0085", "\x1c"]
    for _ in range(3000):
        text = "".join(draw.choice(marks, draw.integers(1, 40)))
        assert detokenised(text) == by_expressions(text), repr(text)


@pytest.mark.parametrize("max_s", [60, pytest.param(2, marks=pytest.mark.timing)], ids=["busy", "idle"])
@pytest.mark.parametrize("mark", ["(", '" ', "' ( [ {", "= = ", " @-@"])
def test_detokenised_in_time_that_grows_with_the_text(mark: str, max_s: float) -> None:
    text, began = mark * (1 << 19), time.perf_counter()
    detokenised(text)
    assert time.perf_counter() - began < max_s, "half a million marks; where it is quadratic it takes hours"


def test_pages_begin_at_titles_of_the_first_level() -> None:
    text = " \n = A = \n x = y \n = = A.1 = = \n = not a title \n = B = \n = = = b = = = \n"
    one, two = " = A = \n x = y \n = = A.1 = = \n = not a title ", " = B = \n = = = b = = = \n"
    assert list(pages(text)) == [one, two], "a page of nothing is none"
    assert list(pages("no title")) == ["no title"] and list(pages(f"before\n{two}")) == ["before", two]


def test_a_run_reads_what_is_left(
    executor: NativeExecutor, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, seen = cut(GPTQ, TEXT, tokenizer, LENGTH, 128), list[Any]()
    whole = found(executor, text, tmp_path)
    (tmp_path / "kept").unlink()

    def spied(of: Any, ids: Any, first: int) -> Any:
        seen.append(ids.tolist())
        return losses(of, ids, first)

    monkeypatch.setattr(perplexity, "losses", spied)
    assert found(executor, text, tmp_path, limit=2) == whole[:2] and len(seen) == 2
    data = (tmp_path / "kept").read_bytes()
    (tmp_path / "kept").write_bytes(data[:-5])  # the second one was cut
    assert found(executor, text, tmp_path) == whole and len(seen) == 2 + len(whole) - 1
    assert found(executor, text, tmp_path, limit=3) == whole[:3] and len(seen) == 1 + len(whole), "fewer are there, too"


def test_windows_by_default_and_what_is_too_long_or_short(tokenizer: Tokenizer) -> None:
    long = TEXT * 40
    assert [cut(d, long, tokenizer, None, 4096).window for d in (GPTQ, LLAMA_PERPLEXITY, LM_EVAL)] == [2048, 512, 4096]
    assert [cut(d, long, tokenizer, None, 100).window for d in (GPTQ, LLAMA_PERPLEXITY, LM_EVAL)] == [100] * 3
    with pytest.raises(ConfigError, match=r"--window 129 is longer.*\n.*at most 128 tokens"):
        cut(GPTQ, TEXT, tokenizer, 129, 128)
    for definition in (GPTQ, LLAMA_PERPLEXITY):
        with pytest.raises(ConfigError, match=r"has \d tokens of this model.*\n.*at least 64, one window"):
            cut(definition, "too short", tokenizer, 64, 128)
    with pytest.raises(ConfigError, match="a context of 15 tokens is too short"):
        cut(LM_EVAL, TEXT, tokenizer, None, 15)


class Letters(Tokenizer):
    """A token a character; no BOS."""

    def __init__(self, eos: int | None) -> None:
        super().__init__(128, SpecialTokens(named={}, bos_token_id=None, eos_token_id=eos, ids=frozenset()))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def _token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    _first_bytes = _token_bytes


def test_a_model_without_a_beginning_token() -> None:
    """Windows begin as they are; a document begins at the end token, or nowhere."""
    text = "abcdefgh" * 10
    for definition in (GPTQ, LLAMA_PERPLEXITY):
        found = cut(definition, text, Letters(None), 16, 64)
        assert found.bos == "none" and [bytes(u.parts[0].ids.tolist()) for u in found.units] == [b"abcdefgh" * 2] * 5
    found = cut(LM_EVAL, text, Letters(7), 16, 64)
    assert found.bos == "none: EOS" and found.units[0].parts[0].ids.tolist()[:2] == [7, ord("a")]
    with pytest.raises(ConfigError, match="neither a BOS nor an EOS"):
        cut(LM_EVAL, text, Letters(None), 16, 64)


def test_logits_that_are_not_finite(executor: NativeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.evaluate.divergence.log_softmax", lambda logits: np.full(logits.shape, np.nan))
    with pytest.raises(MachineError, match="logits are not finite"):
        losses(executor, np.array([1, 2, 3], np.int32), 0)
