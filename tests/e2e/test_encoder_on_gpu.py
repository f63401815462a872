"""An encoder with `--device cuda`, from the command line to its vectors: tensors of this CPU stand for a GPU's."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from millrace import LLM
from millrace.compile import resolve_model
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.device_lookup import DeviceId
from millrace.engine.cuda.encoder_executor import CudaEncoderExecutor
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.encoder_inputs import text_inputs
from millrace.env import read_env
from millrace.errors import ConfigError, EngineError, MachineError, MillraceError, RequestError
from millrace.runtime.open_engine import OpenedEncoder, open_encoder
from millrace.runtime.settings import RunSettings
from tests.e2e.test_on_gpu import HERE, never
from tests.runtime.test_embeddings import TEXTS, by_transformers, vectors
from tests.serve.test_embeddings import serving
from tests.support.checkpoints import random_cross_encoder, random_encoder
from tests.support.engines import build

PRECISIONS = [("fp32", 1e-6), ("bf16", 0.02), ("w8a8", 0.05)]  # how far from transformers, as on a CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)


def engine_of(folder: Path, **build: Any) -> GpuEngine:
    _, engine = find_engine(str(folder), BuildSettings(**build), read_env(), place=DeviceId("cuda"))
    assert isinstance(engine, GpuEngine)
    return engine


@pytest.mark.parametrize(("precision", "farthest"), PRECISIONS)
def test_vectors_are_those_of_transformers(precision: str, farthest: float, folder: Path) -> None:
    """In one step and, with few texts and tokens a step, in many; asked by many threads at once."""
    want = by_transformers(folder, TEXTS)
    with LLM(folder, precision=precision, device="cuda") as llm:
        assert isinstance(llm._opened, OpenedEncoder) and isinstance(llm._opened.network, CudaEncoderExecutor)
        assert llm._opened.isa == HERE.name
        kept = llm._opened.engine.folder
        got = vectors(llm.embed(TEXTS, truncate_prompt_tokens=-1))
        with ThreadPoolExecutor(8) as pool:
            alone = list(pool.map(lambda text: vectors(llm.embed(text, truncate_prompt_tokens=-1))[0], TEXTS))
    assert np.abs(got - want).max() <= farthest and np.abs(np.stack(alone) - want).max() <= farthest
    assert not kept.exists(), "what it needed of files is gone"


def test_of_first_tokens(tmp_path: Path) -> None:
    folder = random_encoder(tmp_path, pooling="cls", normalised=False)
    want = by_transformers(folder, TEXTS[:9], pooling="cls", normalised=False)
    with LLM(folder, device="cuda", max_batch=2) as llm:
        got = vectors(llm.embed(TEXTS[:9], truncate_prompt_tokens=-1))
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def test_a_server_of_vectors(folder: Path) -> None:
    opened = open_encoder("vectors", engine_of(folder), RunSettings(device="cuda"))
    assert opened.engine.manifest.symbols[0].high == 16384 and opened.limits.max_texts == 512
    try:
        with serving(opened.loop(), opened.tokenizer) as server:
            reply = httpx.post(
                f"{server.url}/v1/embeddings", json={"model": "encoder", "input": TEXTS[2:6]}, timeout=60
            )
        got = np.array([row["embedding"] for row in reply.json()["data"]])
        assert np.abs(got - by_transformers(folder, TEXTS[2:6])).max() <= 1e-6
    finally:
        opened.close()


def test_a_device_that_fails_ends_its_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after three steps in a row, and one of its own, the loop: nobody waits for ever."""
    with LLM(folder, device="cuda") as llm:
        monkeypatch.setattr(CudaEncoderExecutor, "_computed", failing)
        for _ in range(3):
            with pytest.raises(EngineError, match="CUDA error"):
                llm.embed(TEXTS[2])
        with pytest.raises(MillraceError, match="stopped"):
            llm.embed(TEXTS[2])


def failing(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_a_run_takes_is_bounded(folder: Path) -> None:
    """By PyTorch's own book, of the longest texts and of the most."""
    engine = engine_of(folder, precision="bf16", max_batch=40)
    limits, network = engine.model.limits, engine.encoder_on_gpu()
    longest = np.zeros(limits.max_context, np.int32)
    most = 0
    for texts in ([longest] * (limits.max_step_tokens // limits.max_context)), [longest[:3]] * limits.max_sequences:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            network.run(text_inputs(texts, [port.name for port in engine.model.lowered.graph.inputs]))
        now = 0
        for event in seen.profiler.kineto_results.events():
            now += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, now)
    assert most <= engine.needs.step_bytes <= 3 * most
    network.close()
    engine.close()


@pytest.mark.parametrize(("gpu", "build", "run", "kind", "words"), [
    ({"free_bytes": 630 << 20}, {}, {}, MachineError, ["may be used", "what would fit: --max-batch 64"]),
    ({"free_bytes": 1 << 20}, {}, {}, MachineError, ["libraries 512 MiB", "free memory of the GPU"]),
    ({}, {"precision": "w4a8"}, {}, ConfigError, ["not measured for encoders"]),
    ({}, {"kv_cache_dtype": "int8"}, {}, ConfigError, ["it keeps no keys and values"]),
    ({}, {"head": "bf16"}, {}, ConfigError, ["it has no head"]),
    ({}, {}, {"kv_memory": 1 << 20}, ConfigError, ["--kv-memory is given for an encoder"]),
    ({"capability": (7, 5)}, {"precision": "bf16"}, {}, ConfigError, ["Turing"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_weight_is_read(
    gpu: dict[str, Any], build: dict[str, Any], run: dict[str, Any], kind: type[MillraceError], words: list[str],
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: replace(HERE, **gpu))
    monkeypatch.setattr(CudaEncoderExecutor, "__init__", never)
    with pytest.raises(kind) as refused:
        open_encoder("e", engine_of(folder, **build), RunSettings(device="cuda", **run))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_inputs_that_do_not_fit(folder: Path) -> None:
    engine = engine_of(folder)
    network, names = engine.encoder_on_gpu(), [port.name for port in engine.model.lowered.graph.inputs]
    given = text_inputs([np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)], names)
    wrong = {
        "lengths of texts": {"lengths": np.array([5, 2], np.int32)},
        "at least 1": {"lengths": np.array([8, 0], np.int32)},
        "tokens|types": {"tokens": given["tokens"][:7]}, "more": {"more": given["tokens"]},
    }  # fmt: skip
    for says, other in wrong.items():
        with pytest.raises(RequestError, match=says):
            network.run({**given, **other})
    network.close()
    engine.close()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_cross_encoder(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint, and from the engine of a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = random_cross_encoder(tmp_path / "model", family=family)
    with LLM(folder, tune=0) as llm:
        want = [output.outputs.score for output in llm.score(TEXTS[3], TEXTS[2:6])]
    build(folder, tmp_path / "engine", "fp32").close()
    for model in (folder, tmp_path / "engine"):
        with LLM(model, device="cuda") as llm:
            got = [output.outputs.score for output in llm.score(TEXTS[3], TEXTS[2:6])]
        assert np.abs(np.array(got) - want).max() <= 1e-6


@pytest.mark.parametrize("family", ["roberta", "nomic_bert"])
def test_positions_of_other_families(family: str, tmp_path: Path) -> None:
    folder = random_encoder(tmp_path, family=family, max_position_embeddings=132, type_vocab_size=1)
    want = by_transformers(folder, TEXTS[:6])
    with LLM(folder, device="cuda") as llm:
        assert np.abs(vectors(llm.embed(TEXTS[:6], truncate_prompt_tokens=-1)) - want).max() <= 1e-6
