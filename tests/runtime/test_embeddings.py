"""Embeddings from checkpoint to vector: against transformers, of any batch, from several threads, and mistakes."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import LLM
from millrace.api.embeddings import EmbeddingRequestOutput
from millrace.compile.builder import build_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.manifest import Manifest, sealed
from millrace.errors import ConfigError, MillraceError, RequestError
from tests.support.checkpoints import random_encoder
from tests.support.vocabularies import corpus

TEXTS = ["x", "", *corpus(3, 12), " ".join(corpus(4, 3)), "The mill. " * 9, "😀 naïve 東京"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, tune=0) as made:
        yield made


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> NDArray[np.float32]:
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def by_transformers(folder: Path, texts: Sequence[str], *, pooling: str = "mean", normalised: bool = True) -> Any:
    """Each text alone, cut at 100 tokens as sentence_bert_config.json says."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.no_grad():
        for text in texts:
            rows = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=100)).last_hidden_state[0]
            found.append(rows[0] if pooling == "cls" else rows.mean(0))
    stacked = torch.stack(found)
    return (torch.nn.functional.normalize(stacked, dim=1) if normalised else stacked).numpy()


def test_vectors_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1)
    assert np.abs(vectors(outputs) - by_transformers(folder, TEXTS)).max() <= 1e-6
    assert [len(o.prompt_token_ids) for o in outputs][:2] == [3, 2] and all(o.finished for o in outputs)
    assert outputs[0].outputs.hidden_size == 96 and len({o.request_id for o in outputs}) == len(TEXTS)


@pytest.mark.parametrize(("pooling", "normalised"), [("cls", True), ("cls", False), ("mean", False), (None, False)])
def test_poolings(pooling: str | None, normalised: bool, tmp_path: Path) -> None:
    folder = random_encoder(tmp_path, pooling=pooling, normalised=normalised)
    expected = by_transformers(folder, TEXTS[:5], pooling=pooling or "mean", normalised=normalised)
    with LLM(folder, tune=0) as llm:
        assert np.abs(vectors(llm.embed(TEXTS[:5])) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("precision", "farthest"), [("bf16", 0.02), ("w8a8", 0.05)])
def test_precisions(precision: str, farthest: float, folder: Path) -> None:
    with LLM(folder, precision=precision, tune=0) as llm:
        assert np.abs(vectors(llm.embed(TEXTS[:9])) - by_transformers(folder, TEXTS[:9])).max() <= farthest


def test_bits_depend_on_the_text_alone(llm: LLM, folder: Path) -> None:
    """Alone, in any order, asked by many threads at once, with one compute thread, and in steps of another size."""
    together = vectors(llm.embed(TEXTS, truncate_prompt_tokens=-1))
    rng = np.random.default_rng(5)
    order = rng.permutation(len(TEXTS))
    shuffled = vectors(llm.embed([TEXTS[i] for i in order], truncate_prompt_tokens=-1))
    assert (shuffled == together[order]).all()
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda text: vectors(llm.embed(text, truncate_prompt_tokens=-1))[0], TEXTS * 3))
    assert (np.stack(alone) == np.concatenate([together] * 3)).all()
    with LLM(folder, tune=0, threads=1, max_batch=3, max_context=130) as other:
        assert (vectors(other.embed(TEXTS[:14])) == together[:14]).all()


def test_prompts_in_other_forms(llm: LLM) -> None:
    text = TEXTS[3]
    ids = llm.tokenizer.encode(text)
    expected = vectors(llm.embed(text))
    for prompt in ([text], {"prompt": text}, {"prompt_token_ids": ids}, ids, [ids], [{"prompt_token_ids": ids}]):
        assert (vectors(llm.embed(prompt)) == expected).all(), prompt
    assert llm.embed([]) == [] and llm.get_tokenizer().cls_token == "[CLS]"


def test_truncation_keeps_the_special_tokens(llm: LLM) -> None:
    text = TEXTS[2] * 9
    ids = llm.tokenizer.encode(text)
    assert len(ids) > 100
    for n in (1, 2, 3, 50, 100):
        (output,) = llm.embed(text, truncate_prompt_tokens=n)
        assert output.prompt_token_ids == ([2, *ids[1 : n - 1], 3] if n > 1 else [2])
        assert llm.embed(ids, truncate_prompt_tokens=n)[0].prompt_token_ids == ids[:n]
    assert llm.tokenizer.special_around == (1, 1)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (["a", "mill " * 99, "b"], {}, "text 1 has 101 tokens"),
    ([[5] * 101], {}, "text 0 has 101 tokens"),
    ([[]], {}, "text 0 has no tokens"),
    ([[5, 403]], {}, "token 1 of text 0 is 403"),
    ([[5, -1]], {}, "token 1 of text 0 is -1"),
    ([[5, True]], {}, "not a list of token ids"),
    ([[5, "a"]], {}, "not a list of token ids"),
    ([[10**400]], {}, "not a list of token ids"),
    ([[1.5]], {}, "not a list of token ids"),
    ([3.5], {}, "a prompt is of type float"),
    (None, {}, "prompts is of type NoneType"),
    (["\ud800"], {}, "surrogate"),
    ("a", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ("a", {"truncate_prompt_tokens": 101}, "truncate_prompt_tokens is 101"),
    ("a", {"truncate_prompt_tokens": True}, "truncate_prompt_tokens is True"),
    ("a", {"pooling_params": 3}, "pooling_params is 3"),
    ("a", {"normalize": False}, "no argument"),
]


@pytest.mark.parametrize(("prompts", "options", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_wrong_texts_say_which_and_why(prompts: Any, options: dict[str, Any], says: str, llm: LLM) -> None:
    with pytest.raises((RequestError, ConfigError)) as error:
        llm.embed(prompts, **options)
    assert says in str(error.value) and len(str(error.value)) < 600
    assert len(llm.embed("a")) == 1


def test_each_kind_of_model_says_what_it_can(llm: LLM, folder: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    for call in (lambda: llm.generate("a"), lambda: llm.chat(message), llm.get_default_sampling_params):
        with pytest.raises(RequestError, match=r"is an encoder(.|\n)*embed\(\)"):
            call()
    with pytest.raises(ConfigError, match='task="embed"'):
        LLM(folder, task="generate", tune=0)
    with LLM(folder, task="embed", runner="pooling", tune=0) as same:
        assert len(same.embed(["a", "b"], use_tqdm=True)) == 2
    with LLM("tiny", tune=0) as decoder:
        with pytest.raises(RequestError, match=r"is a language model(.|\n)*generate\(\) or chat\(\)"):
            decoder.embed("a")
        with pytest.raises(ConfigError, match='task="generate"'):
            LLM("tiny", task="embed", tune=0)


@pytest.mark.parametrize(
    ("name", "instead"), [("score", "embed() for both"), ("encode", "embed()"), ("classify", "embed()")]
)
def test_methods_of_other_libraries_are_answered_by_what_an_encoder_can(folder: Path, name: str, instead: str) -> None:
    with LLM(str(folder)) as llm, pytest.raises(ConfigError) as error:
        getattr(llm, name)("a", "b")
    assert error.value.expected == "embed()" and instead in error.value.fix and "generate" not in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"precision": "w4a8"}, {"head": "bf16"}, {"kv_cache_dtype": "int8"}, {"kv_memory": "1G"},
                 {"max_context": 131}, {"precision": {"default": "fp32", "layer.0.*": "w8a16"}}],
)  # fmt: skip
def test_settings_that_an_encoder_has_not(settings: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(folder, tune=0, **settings)


def test_closed_and_forgotten(folder: Path) -> None:
    llm = LLM(folder, tune=0)
    llm.embed("a")
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.embed("a")


SLOT = {"name": "embeddings", "dtype": "f32", "offset": 0}
HOSTILE: list[dict[str, Any]] = [
    {"vocab_size": 10**9}, {"vocab_size": 0}, {"max_context": 10**6}, {"max_context": 0},
    {"symbols": [{"name": n, "low": 1, "usual": 1, "high": 2**31 - 1} for n in "TS"]},
    {"symbols": [{"name": n, "low": 1, "usual": 1, "high": 9} for n in "ST"]},
    {"symbols": [{"name": n, "low": 1, "usual": 1, "high": 1} for n in "TS"]},
    {"outputs": []}, {"outputs": [{**SLOT, "shape": ["S"]}]}, {"outputs": [{**SLOT, "shape": ["S", "T"]}]},
    {"outputs": [{**SLOT, "shape": ["S", 2**31 - 1]}]}, {"outputs": [{**SLOT, "shape": ["S", 96], "dtype": "i32"}]},
    {"outputs": [{**SLOT, "shape": ["S", 96], "offset": None}]}, {"inputs": []}, {"caches": []},
    {"outputs": [{**SLOT, "shape": ["T", 96]}]}, {"outputs": [{**SLOT, "shape": [96, "S"]}]},
]  # fmt: skip


@pytest.mark.parametrize("values", HOSTILE, ids=lambda v: str(v)[:60])
def test_a_changed_manifest_is_refused_or_gives_vectors(values: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    build_engine("encoder", folder, tmp_path / "e", BuildSettings(tune=0)).close()
    raw = json.loads((tmp_path / "e" / "manifest.json").read_text())
    for name, value in values.items():
        (raw["cpu"] if name in raw["cpu"] else raw)[name] = value
    whole = msgspec.json.encode(sealed(msgspec.convert(raw, Manifest)))
    (tmp_path / "e" / "manifest.json").write_bytes(whole)
    rng = np.random.default_rng(1)
    for texts in (["the mill"], [rng.integers(0, 403, 130).tolist()], [[500]]):
        try:
            with LLM(tmp_path / "e") as llm:
                assert np.isfinite(vectors(llm.embed(texts))).all()
        except MillraceError as error:
            assert len(str(error)) < 700
