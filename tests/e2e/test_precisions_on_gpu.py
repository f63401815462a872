"""What only a GPU has: float16, TF32 and E4M3 on both sides of a product. Tensors of this CPU stand for its."""

import threading
from pathlib import Path

import pytest
import torch

from millrace import LLM, SamplingParams
from millrace.cli.main import run
from millrace.compile import resolve_model
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.device_lookup import DeviceId
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.cuda.executor import CudaExecutor
from millrace.env import read_env
from millrace.errors import CheckpointError, ConfigError
from tests.e2e.test_on_gpu import HERE
from tests.support.checkpoints import random_checkpoint
from tests.support.compressed_files import FP8_PER_TOKEN, Kind, write_compressed

LIKELIEST = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3, dtype="float16")


def engine_of(model: str | Path, **build: object) -> tuple[GpuEngine, list[str]]:
    told: list[str] = []
    _, engine = find_engine(str(model), BuildSettings(**build), read_env(), place=DeviceId("cuda"), say=told.append)  # type: ignore[arg-type]
    assert isinstance(engine, GpuEngine)
    engine.close()
    return engine, told


@pytest.mark.parametrize(
    ("asked", "dtype", "said", "note"),
    [
        (None, "fp16", "fp16", ""), ("fp16", "fp16", "fp16", ""), ("bf16", "bf16", "bf16", "what bf16 costs"),
        ("fp32", "fp32", "fp32", ""), ("tf32", "tf32", "tf32", "what tf32 costs"),
        ("w8a16", "bf16", "w8a16", "what w8a16 costs"), ("fp8", "bf16", "fp8", "what fp8 costs"),
    ],
)  # fmt: skip
def test_what_a_float16_checkpoint_runs_in(
    asked: str | None, dtype: str, said: str, note: str, halves: Path
) -> None:  # fmt: skip
    """Its own floats unless others are asked for; what they cost is said of others alone."""
    engine, told = engine_of(halves, precision=asked)
    assert engine.model.lowered.dtype == dtype and engine.manifest.precision["default"] == said
    assert any(note in line for line in told) if note else not any("costs in answers" in line for line in told)


def test_memory_is_that_of_16_bits(halves: Path) -> None:
    assert engine_of(halves)[0].needs.weights_bytes == engine_of(halves, precision="bf16")[0].needs.weights_bytes
    ours, wide = (engine_of(halves, precision=p)[0].needs.weights_bytes for p in ("tf32", "fp32"))
    assert ours == wide


def test_float16_answers_as_float32_does(halves: Path) -> None:
    """Its weights are exact in either; ten bits behind the leading one seldom change the likeliest token."""
    prompts = [[5, 17, 300, 2, 9], [44, 44, 7]]
    found = {}
    for precision in ("fp32", None):
        with LLM(halves, device="cuda", precision=precision, max_batch=2, max_context=64) as llm:
            found[precision] = [o.outputs[0].token_ids for o in llm.generate(prompts, LIKELIEST)]
    assert found[None] == found["fp32"]


def test_fp8_is_e4m3_on_both_sides(halves: Path) -> None:
    """Of all layers but the head, which has integers of 8 bits, and rows that stay floats."""
    with LLM(halves, device="cuda", precision="fp8", max_batch=2, max_context=64) as llm:
        executor = llm._opened.executor  # type: ignore[union-attr]
        assert isinstance(executor, CudaExecutor)
        for node, matrices in executor._loaded.coded.items():
            is_head = "lm_head" in node.origin
            assert executor._takes_e4m3(node) != is_head
            assert all((m.codes.dtype == torch.float8_e4m3fn) != is_head for m in matrices)
        assert llm.generate([[5, 17, 300]], LIKELIEST)[0].finished
    engine, _ = engine_of(halves, precision="fp8")
    assert engine.manifest.precision == {"default": "fp8", "lm_head": "w8a16"}
    assert not engine_of(halves, precision="fp8a16")[0].model.lowered.e4m3


@pytest.mark.parametrize("activations", [FP8_PER_TOKEN, None], ids=["of fp8", "of floats"])
def test_a_checkpoint_in_fp8_has_the_rows_that_it_means(activations: object, tmp_path: Path, halves: Path) -> None:
    """By its own configuration: E4M3 on both sides, or weights alone. The head is not compressed."""
    kind = Kind("float-quantized", 8, None, floats=True, scale="float32", activations=activations)  # type: ignore[arg-type]
    write_compressed(tmp_path / "c", halves, kind)
    with LLM(tmp_path / "c", device="cuda", max_batch=2, max_context=64) as llm:
        executor = llm._opened.executor  # type: ignore[union-attr]
        assert isinstance(executor, CudaExecutor)
        met = {executor._takes_e4m3(node) for node in executor._loaded.coded if "lm_head" not in node.origin}
        assert met == {activations is not None}
        assert llm.generate([[5, 17, 300]], LIKELIEST)[0].finished


def test_vllms_names(halves: Path) -> None:
    for dtype in ("float16", "half", torch.float16):
        with LLM(halves, device="cuda", dtype=dtype, max_batch=1, max_context=64) as llm:
            assert llm._opened.engine.manifest.precision["default"] == "fp16"
    with pytest.raises(ConfigError, match=r"dtype is 'half'.*\n.*\n.*float16 is for a GPU"):
        LLM(halves, dtype="half")


def test_a_cpu_says_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    for precision, words in (
        ("fp16", "float16 is for a GPU"),
        ("tf32", "tf32 is for a GPU: use fp32"),
        ("fp8", "it is for a GPU"),
    ):
        assert run(["generate", "tiny", "Once", "--precision", precision]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    import safetensors.torch

    folder = random_checkpoint(tmp_path, "llama", seed=3, max_shard_size="1GB")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="too large for float16"):
        LLM(folder, device="cuda", precision="fp16", max_batch=1, max_context=64)


def test_products_of_float32_are_what_each_engine_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one switch for a process: two engines in two threads each find it as they want it."""
    seen: dict[str, set[bool]] = {"tf32": set(), "fp32": set()}
    walked = CudaExecutor._walked

    def looking(self: CudaExecutor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "tf32" if self._tf32 else "fp32"
        seen[name].add(torch.backends.cuda.matmul.allow_tf32)
        found = walked(self, inputs)
        seen[name].add(torch.backends.cuda.matmul.allow_tf32)
        return found

    monkeypatch.setattr(CudaExecutor, "_walked", looking)
    llms = [LLM("tiny", device="cuda", precision=p, max_batch=1, max_context=64) for p in seen]
    threads = [threading.Thread(target=llm.generate, args=("Once", LIKELIEST)) for llm in llms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for llm in llms:
        llm.close()
    assert seen == {"tf32": {True}, "fp32": {False}}
    torch.backends.cuda.matmul.allow_tf32 = False
