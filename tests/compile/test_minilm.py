"""A real encoder, all-MiniLM-L6-v2, against transformers: what a rounding costs is seen on trained weights only."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.engine import Engine
from tools.nightly.packages import minilm

TEXTS = (
    "x", "Hello, world!", "The river runs past a mill, and the miller counts his sacks.", "A " * 300,
    "Why does the wheel turn? " * 9, "Ein Müller zählt seine Säcke.",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "farthest", "least_cosine"), [("fp32", 1e-5, 0.999999), ("bf16", 0.005, 0.9999), ("w8a8", 0.05, 0.99)]
)
def test_embeddings(precision: str, farthest: float, least_cosine: float, tmp_path: Path) -> None:
    import torch
    import transformers

    folder = minilm()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [np.array(tokenizer(text).input_ids, np.int32) for text in TEXTS]
    with torch.no_grad():
        means = [model(torch.tensor(t[None], dtype=torch.int64)).last_hidden_state[0].mean(0) for t in ids]
    assert [list(t) for t in ids] == [Checkpoint.open(folder).tokenizer.encode(text) for text in TEXTS]
    exact = torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()
    source = Source.from_checkpoint(Checkpoint.open(folder), max_context=512)
    options = BuildOptions(precision=precision_map(precision), max_batch=8, max_step_tokens=1024)
    write_engine(source, plan_engine(source, options), tmp_path / "minilm", name="minilm")
    network = Engine.open(tmp_path / "minilm").network()
    got = network.run(packed(ids))["embeddings"]
    network.close()
    assert np.abs(got - exact).max() <= farthest and (got * exact).sum(axis=1).min() >= least_cosine


def packed(ids: list[NDArray[np.int32]]) -> dict[str, NDArray[np.int32]]:
    tokens = np.concatenate(ids)
    return {
        "tokens": tokens, "types": np.zeros_like(tokens), "lengths": np.array([len(t) for t in ids], np.int32),
        "positions": np.concatenate([np.arange(len(t), dtype=np.int32) for t in ids]),
    }  # fmt: skip
