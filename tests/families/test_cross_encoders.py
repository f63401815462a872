"""Cross-encoders on random checkpoints of odd sizes: scores as close to float64 as transformers' own, tokens equal."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import LLM
from millrace.api.scores import ScoringRequestOutput
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.errors import CheckpointError, MillraceError, RequestError
from tests.support.checkpoints import ENCODERS, random_cross_encoder
from tests.support.tolerance import assert_no_worse
from tests.support.vocabularies import corpus, strange_text

torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="the independent truth")

QUERIES = ["", "x", *corpus(5, 4)]
TEXTS = ["", "the mill", "a" * 40, *corpus(6, 3)]
FAMILIES = [name for name in ENCODERS if name not in ("camembert", "nomic_bert", "mpnet")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def truth(folder: Path, dtype: Any, pairs: Sequence[tuple[str, str]], **options: Any) -> NDArray[np.float64]:
    """Return the classifier's outputs, each pair alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = [model(**tokenizer([pair], return_tensors="pt", **options)).logits[0, 0].double() for pair in pairs]
    return np.array(found)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def scores(outputs: Sequence[ScoringRequestOutput]) -> NDArray[np.float32]:
    return np.array([output.outputs.score for output in outputs], np.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 6))])
def test_scores(family: str, seed: int, tmp_path: Path) -> None:
    """Of pairs in one batch and alone, and of one text with many: the bits depend on the pair alone."""
    folder = random_cross_encoder(tmp_path / "model", seed, family=family, activation="Identity")
    pairs = list(zip(QUERIES, TEXTS, strict=True))
    with LLM(folder, tune=0) as llm:
        ours = scores(llm.score(QUERIES, TEXTS))
        alone = np.concatenate([scores(llm.score(*pair)) for pair in pairs])
        many = scores(llm.score(QUERIES[2], TEXTS))
    assert (alone == ours).all() and many[2] == ours[2]
    assert_no_worse(ours, truth(folder, torch.float32, pairs), truth(folder, torch.float64, pairs))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_activation_is_a_sigmoid_unless_said_otherwise(family: str, tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "model", family=family)
    expected = truth(folder, torch.float64, list(zip(QUERIES, TEXTS, strict=True)))
    with LLM(folder, tune=0) as llm:
        assert np.abs(scores(llm.score(QUERIES, TEXTS)) - sigmoid(expected)).max() <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_pairs(family: str, tmp_path: Path) -> None:
    """As transformers joins and shortens them."""
    folder, rng = random_cross_encoder(tmp_path / "model", family=family), random.Random(4)
    ours, theirs = open_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*QUERIES, *TEXTS, *(strange_text(rng, rng.randrange(1, 30)) for _ in range(40))]
    for limit in (None, 4, 5, 9, 24, 25):
        for first, second in zip(texts, texts[::-1], strict=True):
            options = {"truncation": limit is not None, "max_length": limit, "return_token_type_ids": True}
            expected = theirs([(first, second)], **options)
            a, b = (ours.encode(text, add_special_tokens=False) for text in (first, second))
            ids, n_first = ours.pair_template.join(a, b, limit)
            assert ids == expected.input_ids[0]
            assert [int(i >= n_first) for i in range(len(ids))] == expected.token_type_ids[0]
    with pytest.raises(RequestError, match="special tokens of a pair"):
        ours.pair_template.join([9], [9], 1)


def test_long_pairs(tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "model", activation="Identity")
    pair = ("the mill " * 50, "a wheel " * 90)
    with LLM(folder, tune=0) as llm:
        with pytest.raises(RequestError, match="the pair of data_2 0 has"):
            llm.score(*pair)
        (output,) = llm.score(*pair, truncate_prompt_tokens=-1)
        assert len(output.prompt_token_ids) == 130
        expected = truth(folder, torch.float64, [pair], truncation=True, max_length=130)
        assert abs(output.outputs.score - expected[0]) <= 1e-5
        for arguments, says in (
            ((["a", "b"], ["a", "b", "c"]), "data_1 has 2 texts, and data_2 3"), ((3, "a"), "data_1 is 3"),
            (([], "a"), "data_1 has 0 texts"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=says):
                llm.score(*arguments)
        assert llm.score("a", []) == []
        with pytest.raises(RequestError, match=r"cross-encoder[\s\S]*score\(\)"):
            llm.embed("a")
        with pytest.raises(RequestError, match=r"score\(\)"):
            llm.generate("a")
        with pytest.raises(MillraceError, match="classify"):
            llm.classify("a")


def rewrite(path: Path, **keys: object) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **keys}))


@pytest.mark.parametrize(("file", "keys", "says"), [
    ("config.json", {"id2label": {"0": "a", "1": "b"}}, "id2label is .*one label"),
    ("config.json", {"id2label": None}, "num_labels is None.*one label"),
    ("config.json", {"id2label": None, "num_labels": 3}, "num_labels is 3.*one label"),
    ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation_fn is .*Sigmoid"),
    ("config.json", {"sentence_transformers": 3}, "sentence_transformers is 3.*object"),
    ("config.json", {"sbert_ce_default_activation_function": "x"}, "sbert_ce_default.*Sigmoid"),
    ("config_sentence_transformers.json", {"activation_fn": 1}, "transformers.json: activation_fn is 1"),
    ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "feature-extraction"),
    ("sentence_bert_config.json", {"max_seq_length": 131}, "131.*130"),
])  # fmt: skip
def test_mistakes(file: str, keys: dict[str, object], says: str, tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "model")
    rewrite(folder / file, **keys)
    with pytest.raises(CheckpointError, match=f"(?s){says}"):
        Checkpoint.open(folder)


def test_activations_by_file(tmp_path: Path) -> None:
    """config_sentence_transformers.json takes precedence; each is part of the identity."""
    folder = random_cross_encoder(tmp_path / "model")
    config, identities = folder / "config.json", {Checkpoint.open(folder).identity()}
    for path, keys, expected in (
        (config, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        (config, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        (folder / "config_sentence_transformers.json", {"activation_fn": "torch.nn.Identity"}, "identity"),
    ):
        rewrite(path, **keys)
        checkpoint = Checkpoint.open(folder)
        assert isinstance(checkpoint.config, EncoderConfig) and checkpoint.config.score_activation == expected
        assert checkpoint.notes == ()
        identities.add(checkpoint.identity())
    assert len(identities) == 4


def test_types_that_the_model_does_not_have(tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "model", type_vocab_size=1)
    with pytest.raises(CheckpointError, match=r"(?s)type 1.*type_vocab_size 1"):
        LLM(folder, tune=0)


def test_modules_of_another_kind(tmp_path: Path) -> None:
    folder = random_cross_encoder(tmp_path / "model")
    modules = [{"type": "sentence_transformers.base.modules.Transformer", "path": ""}]
    (folder / "modules.json").write_text(json.dumps(modules))
    Checkpoint.open(folder)
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "a.LogitScore", "path": "1"}]))
    with pytest.raises(CheckpointError, match=r"(?s)LogitScore.*Transformer alone"):
        Checkpoint.open(folder)
