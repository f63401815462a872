"""A real encoder, all-MiniLM-L6-v2, against transformers: what a rounding costs is seen on trained weights only."""

from pathlib import Path

import numpy as np
import pytest

from millrace import LLM
from tools.nightly.packages import minilm

TEXTS = (
    "x", "Hello, world!", "The river runs past a mill, and the miller counts his sacks.", "A " * 300,
    "Why does the wheel turn? " * 9, "Ein Müller zählt seine Säcke.",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "farthest", "least_cosine"), [("fp32", 1e-5, 0.999999), ("bf16", 0.005, 0.9999), ("w8a8", 0.05, 0.99)]
)
def test_embeddings(
    precision: str, farthest: float, least_cosine: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = minilm()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text).input_ids for text in TEXTS]
    with torch.no_grad():
        means = [model(torch.tensor([t])).last_hidden_state[0].mean(0) for t in ids]
    exact = torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()
    with LLM(folder, precision=precision, max_context=512) as llm:
        outputs = llm.embed(TEXTS)
    assert [o.prompt_token_ids for o in outputs] == ids
    got = np.array([o.outputs.embedding for o in outputs])
    assert np.abs(got - exact).max() <= farthest and (got * exact).sum(axis=1).min() >= least_cosine
