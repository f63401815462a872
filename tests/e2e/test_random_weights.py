"""`--random-weights`: a model of which only config.json and the tokenizer are here. Tensors of this CPU are a GPU's."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace import LLM, SamplingParams
from millrace.cli.main import run
from millrace.compile import resolve_model
from millrace.engine.cuda.executor import CudaExecutor
from millrace.errors import CheckpointError, ConfigError
from millrace.runtime.open_engine import RunningModel
from tests.e2e.test_on_gpu import HERE
from tests.support.checkpoints import random_checkpoint, random_encoder

SMALL = ["--max-batch", "4", "--max-context", "128", "--isl", "8", "--osl", "4", "--request-count", "3", "--json"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)


def without_weights(folder: Path) -> Path:
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_weights(random_checkpoint(tmp_path_factory.mktemp("shape"), "llama", seed=1))


@pytest.mark.parametrize("precision", [None, "fp16", "bf16", "w4a16", "w8a8", "fp8"])
def test_a_load_on_a_shape(precision: str | None, shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--precision", precision] if precision else []
    assert run(["bench", "--engine", str(shape), "--device", "cuda", "--random-weights", *asked, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["whole"] == 3


def test_weights_are_normal_and_the_same_at_every_start(shape: Path) -> None:
    """With the spread that keeps rows of their size as they are; norms are 1."""
    seen = []
    for _ in range(2):
        with LLM(shape, device="cuda", random_weights=True, max_batch=2, max_context=64) as llm:
            assert isinstance(llm._opened, RunningModel) and isinstance(llm._opened.executor, CudaExecutor)
            assert any("random" in note for note in llm._opened.engine.manifest.notes)
            loaded = llm._opened.executor._loaded.tensors
            seen.append(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0))[0].outputs[0].token_ids)
            for value, x in loaded.items():
                assert value.constant is not None
                if value.constant.origin[0].endswith("proj.weight"):
                    assert abs(float(x.std()) * x.shape[1] ** 0.5 - 1) < 0.1, value.constant.origin
                if value.constant.origin[0].endswith("norm.weight"):
                    assert torch.equal(x, torch.ones_like(x))
    assert seen[0] == seen[1]


def test_an_encoder(tmp_path: Path) -> None:
    folder = without_weights(random_encoder(tmp_path))
    with LLM(folder, device="cuda", random_weights=True) as llm:
        vectors = np.array([o.outputs.embedding for o in llm.embed(["a mill", "a river"])])
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with LLM(folder, device="cuda", random_weights=True) as llm:
        assert any("do not follow config.json's quantization_config" in n for n in llm._opened.engine.manifest.notes)


def test_mistakes(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="random_weights is given for a CPU"):
        LLM(shape, random_weights=True)
    with pytest.raises(CheckpointError, match="weight"):
        LLM(shape, device="cuda")  # which is not what nobody asked for
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(shape / "config.json", bare)
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(bare, device="cuda", random_weights=True)
    for flags, words in ((["--random-weights"], "--random-weights"), (["--precision", "bf16"], "--precision is given")):
        assert run(["bench", "http://127.0.0.1:1", "--model", "m", *flags]) == 2
        assert words in capsys.readouterr().err
