"""Encoders on random checkpoints of odd sizes: vectors as close to float64 as transformers' own, and tokens equal."""

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

from millrace import LLM
from millrace.api.embeddings import EmbeddingRequestOutput
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.errors import CheckpointError, RequestError
from millrace.kernels.attention.ref import distance_buckets
from tests.support.checkpoints import random_encoder
from tests.support.tolerance import assert_no_worse
from tests.support.vocabularies import corpus, save_xlm_roberta, strange_text

torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="the independent truth")

# Sizes that differ from BERT's: one type of tokens; positions begin after the padding token's row.
OWN: dict[str, dict[str, Any]] = {
    "roberta": {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm-roberta": {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "nomic_bert": {"max_position_embeddings": 128, "type_vocab_size": 1},
    "mpnet": {"relative_attention_num_buckets": 32},
    "camembert": {"pad_token_id": 5, "max_position_embeddings": 134, "type_vocab_size": 1},
}
LONGEST = 128  # tokens: 130 or 134 rows of positions, less those up to the padding token's


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encoder(folder: Path, family: str, seed: int = 0, **options: Any) -> Path:
    random_encoder(folder, seed, family=family, **{**OWN[family], **options})
    (folder / "sentence_bert_config.json").unlink(missing_ok=True)
    return folder


def token_ids(seed: int, lengths: Sequence[int] = (1, 2, 17, 64, 65, LONGEST)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 403, n).tolist() for n in lengths]  # no padding tokens


def truth(folder: Path, texts: Sequence[list[int]], dtype: Any, pooling: str | None) -> NDArray[np.float64]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).last_hidden_state[0].double().numpy() for ids in texts]
    return np.stack([r[0] if pooling == "cls" else r.mean(0) for r in rows])


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> NDArray[np.float32]:
    return np.array([output.outputs.embedding for output in outputs], np.float32)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("pooling", ["cls", None])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 6))])
def test_vectors(family: str, pooling: str | None, seed: int, tmp_path: Path) -> None:
    """In one batch, alone, and in small steps: the bits depend on the text alone."""
    folder, texts = encoder(tmp_path / "model", family, seed, pooling=pooling, normalised=False), token_ids(seed)
    with LLM(folder, tune=0) as llm:
        ours = vectors(llm.embed(texts))
        assert all((vectors(llm.embed([text]))[0] == row).all() for text, row in zip(texts, ours, strict=True))
        with pytest.raises(RequestError, match=f"at most {LONGEST}"):
            llm.embed([[9] * (LONGEST + 1)])
    exact, theirs = truth(folder, texts, torch.float64, pooling), truth(folder, texts, torch.float32, pooling)
    for row in range(len(texts)):
        assert_no_worse(ours[row], theirs[row], exact[row])


def test_biases_by_distance_in_long_texts(tmp_path: Path) -> None:
    """MPNet: distances beyond the last bucket, in texts of several spans of keys, as the reference table has them."""
    folder = encoder(tmp_path / "model", "mpnet", max_position_embeddings=602, normalised=False)
    texts = token_ids(4, (255, 257, 600))
    with LLM(folder, tune=0) as llm:
        ours = vectors(llm.embed(texts))
    exact, theirs = truth(folder, texts, torch.float64, "mean"), truth(folder, texts, torch.float32, "mean")
    for row in range(len(texts)):
        assert_no_worse(ours[row], theirs[row], exact[row])


@pytest.mark.parametrize("n_buckets", [8, 32])
def test_buckets_are_those_of_transformers(n_buckets: int) -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = np.arange(-700, 700)
    theirs = MPNetEncoder.relative_position_bucket(torch.from_numpy(distances), num_buckets=n_buckets)
    assert (distance_buckets(distances, n_buckets) == theirs.numpy()).all()


@pytest.mark.parametrize("family", ["xlm-roberta", "mpnet"])
@pytest.mark.parametrize(("precision", "farthest"), [("bf16", 0.03), ("w8a8", 0.08)])
def test_precisions(family: str, precision: str, farthest: float, tmp_path: Path) -> None:
    folder, texts = encoder(tmp_path / "model", family), token_ids(1)
    exact = truth(folder, texts, torch.float64, "mean")
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    with LLM(folder, precision=precision, tune=0) as llm:
        assert np.abs(vectors(llm.embed(texts)) - exact).max() <= farthest


@pytest.mark.parametrize("family", OWN)
def test_texts(family: str, tmp_path: Path) -> None:
    """From text to vector, with the tokens that transformers makes of it."""
    folder = encoder(tmp_path / "model", family, pad_token_id=1)
    rng = random.Random(3)
    texts = ["", "x", " x", "a  b\n", "a<mask> b", "</s>", *corpus(3, 9), *(strange_text(rng, 9) for _ in range(30))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [tokenizer(text).input_ids for text in texts]
    assert [open_tokenizer(folder).encode(text) for text in texts] == expected
    with LLM(folder, tune=0) as llm:
        outputs = llm.embed(texts[:9])
        assert [output.prompt_token_ids for output in outputs] == expected[:9]
        exact = truth(folder, expected[:9], torch.float64, "mean")
        assert np.abs(vectors(outputs) - exact / np.linalg.norm(exact, axis=1, keepdims=True)).max() <= 1e-6


def test_weights_of_a_model_with_a_head(tmp_path: Path) -> None:
    """A checkpoint of RobertaForMaskedLM: its names have a prefix, and its head is not used."""
    folder = encoder(tmp_path / "model", "roberta")
    before = truth(folder, token_ids(2), torch.float64, "mean")
    body = transformers.AutoModel.from_pretrained(folder)
    model = transformers.RobertaForMaskedLM(body.config)
    model.roberta.load_state_dict(body.state_dict(), strict=False)
    model.save_pretrained(folder)
    with LLM(folder, tune=0) as llm:
        ours = vectors(llm.embed(token_ids(2)))
    assert np.abs(ours - before / np.linalg.norm(before, axis=1, keepdims=True)).max() <= 1e-6


def test_a_position_table_of_another_size(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "roberta")
    config = (folder / "config.json").read_text().replace("130", "128")
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"position_embeddings.weight\" is \(130, 96\)[\s\S]*\(128, 96\)"):
        LLM(folder, tune=0)


def test_texts_are_normalised_as_by_sentencepiece(tmp_path: Path) -> None:
    """By the character map of XLM-RoBERTa's files, alone and with the spaces of BGE-M3's."""
    folder = tmp_path / "model"
    save_xlm_roberta(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(nfkc_charsmap()).decode()}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    texts = ["ﷺ Ａｂｃ  ﬁ", "the  mill ", "½ ① x", *corpus(3, 9)]  # noqa: RUF001
    for normalizer in (charsmap, {"type": "Sequence", "normalizers": [charsmap, spaces]}):
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": normalizer}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert [open_tokenizer(folder).encode(text) for text in texts] == [theirs(text).input_ids for text in texts]


def nfkc_charsmap() -> bytes:
    model, written = sentencepiece_model_pb2.ModelProto(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=written, vocab_size=200, normalization_rule_name="nmt_nfkc",
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    model.ParseFromString(written.getvalue())
    charsmap: bytes = model.normalizer_spec.precompiled_charsmap
    return charsmap
