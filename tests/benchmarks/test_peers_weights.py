"""The exported files hold the same model: each peer's greedy tokens are Millrace's, in float32 throughout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Phase, Workload
from millrace.checkpoint.checkpoint import Checkpoint
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits

PROMPT = [1, 17, 300, 5, 42, 640, 9, 1000, 77, 2]
NEW = 24
SIZES: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 384,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return Checkpoint.open(random_checkpoint(folder, request.param, **SIZES))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Millrace's own greedy continuation of PROMPT."""
    engine = build(checkpoint.folder, tmp_path_factory.mktemp("engine") / "fp32", "fp32")
    executor = engine.executor(n_pages=4)
    tokens = list(PROMPT)
    for _ in range(NEW):
        tokens.append(int(last_logits(engine, executor, [tokens])[0].argmax()))
    executor.close()
    return tokens[len(PROMPT) :]


def test_llama_cpp_says_the_same(checkpoint: Checkpoint, expected: list[int], tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="extra: peers")
    pytest.importorskip("gguf", reason="extra: peers")
    from benchmarks.peers.gguf_file import write_gguf
    from benchmarks.peers.llama_cpp_engine import LlamaCppEngine, Tried, batches

    path = tmp_path / "f32.gguf"
    write_gguf(path, NamedWeights.of(checkpoint), "f32")
    engine = LlamaCppEngine(path, threads=2, cache=llama_cpp.GGML_TYPE_F32)
    size = Workload(Phase.DECODE, users=1, prompt=len(PROMPT), new=NEW)
    context = engine.context(size, Tried(flash=False))
    tokens, step = list(PROMPT), [(t, i, 0, i == len(PROMPT) - 1) for i, t in enumerate(PROMPT)]
    for _ in range(NEW):
        with batches([step]) as batch:
            context.decode(batch)
        tokens.append(int(context.logits(len(step) - 1, checkpoint.decoder.vocab_size).argmax()))
        step = [(tokens[-1], len(tokens) - 1, 0, True)]
    context.close()
    engine.close()
    assert tokens[len(PROMPT) :] == expected


def test_openvino_says_the_same(checkpoint: Checkpoint, expected: list[int], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="extra: peers")
    from benchmarks.peers.openvino_engine import CompiledModel
    from benchmarks.peers.openvino_ir import write_ir

    path = tmp_path / "f32.xml"
    write_ir(path, NamedWeights.of(checkpoint), "f32")
    model = CompiledModel(path, {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"})
    tokens = list(PROMPT)
    logits = model.step(np.array([PROMPT]), 0)
    for _ in range(NEW):
        tokens.append(int(logits[0].argmax()))
        logits = model.step(np.array([tokens[-1:]]), len(tokens) - 1)
    assert tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("variant", ["int4", "int4-asym"])
def test_openvino_in_four_bits_computes_the_same_model(checkpoint: Checkpoint, variant: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="extra: peers")
    from benchmarks.peers.openvino_engine import CompiledModel
    from benchmarks.peers.openvino_ir import write_ir

    found = []
    for kind in ("f32", variant):
        write_ir(tmp_path / f"{kind}.xml", NamedWeights.of(checkpoint), kind)
        model = CompiledModel(tmp_path / f"{kind}.xml", {"INFERENCE_PRECISION_HINT": "f32"})
        found.append(model.step(np.array([PROMPT]), 0)[0].copy())
    assert np.corrcoef(*found)[0, 1] > 0.85, "rounding a model of random weights leaves 0.92 to 0.95; another has 0"
