"""A real encoder, all-MiniLM-L6-v2, against transformers: what a rounding costs is seen on trained weights only."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import LLM
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.passes.pipeline import run_passes, unfused
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.engine.encoder_inputs import text_inputs
from millrace.engine.reference.interpreter import Interpreter
from tools.nightly.packages import minilm

TEXTS = (
    "x", "Hello, world!", "The river runs past a mill, and the miller counts his sacks.", "A " * 300,
    "Why does the wheel turn? " * 9, "Ein Müller zählt seine Säcke.",
)  # fmt: skip


def of_transformers(folder: Path) -> tuple[list[list[int]], NDArray[np.float32]]:
    """Token ids and vectors of all texts."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text).input_ids for text in TEXTS]
    with torch.no_grad():
        means = [model(torch.tensor([t])).last_hidden_state[0].mean(0) for t in ids]
    return ids, torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()


@pytest.mark.nightly
def test_the_reference_reads_it_too() -> None:
    """The traced graph in float64, without a kernel of ours."""
    folder = minilm()
    ids, exact = of_transformers(folder)
    source = Source.from_checkpoint(Checkpoint.open(folder), max_context=512)
    plan = plan_engine(source, BuildOptions(precision=precision_map("fp32")))
    graph = run_passes(plan.traced, unfused(plan.precision))
    inputs = text_inputs([np.array(t, np.int32) for t in ids], [port.name for port in graph.inputs])
    got = Interpreter(graph, kv=KvFormat.F32, bf16_table=False).run(inputs)["embeddings"]
    assert np.abs(got - exact).max() <= 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "farthest", "least_cosine"), [("fp32", 1e-5, 0.999999), ("bf16", 0.005, 0.9999), ("w8a8", 0.05, 0.99)]
)
def test_embeddings(
    precision: str, farthest: float, least_cosine: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = minilm()
    ids, exact = of_transformers(folder)
    with LLM(folder, precision=precision, max_context=512) as llm:
        outputs = llm.embed(TEXTS)
    assert [o.prompt_token_ids for o in outputs] == ids
    got = np.array([o.outputs.embedding for o in outputs])
    assert np.abs(got - exact).max() <= farthest and (got * exact).sum(axis=1).min() >= least_cosine
