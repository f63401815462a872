"""`--device cuda` from the command line to the answer, with tensors of this CPU in place of a GPU's."""

import importlib.abc
import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from millrace import LLM, SamplingParams
from millrace.cli.chat.chat_screen import Terminal
from millrace.cli.main import run
from millrace.cli.serve.flags import QueueFlags, ServeFlags
from millrace.cli.serve.run import _introduce, _to_serve
from millrace.compile import resolve_model
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda import device_constants, executor
from millrace.engine.cuda.device_lookup import DeviceId, Gpu, find_gpu
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.host_device_copy import on_device_context
from millrace.engine.cuda.memory_plan import SHARE
from millrace.engine.executor import StepInputs, StepOutputs
from millrace.env import read_env
from millrace.errors import ConfigError, EngineError, MachineError, MillraceError
from millrace.runtime.open_engine import RunningModel, open_engine
from millrace.runtime.settings import RunSettings
from tests.e2e.live import MODEL, serving
from tests.support.shared import shared

HERE = Gpu("cpu", "NVIDIA Tensors of this CPU", (9, 0), 2 << 30, 1)
STORIES = str(shared("models/stories260K"))
SMALL: dict[str, Any] = {"max_batch": 4, "max_context": 256}
PROMPTS = ["Once upon a time", "The boy", "Lily and Tom went to the park. They"]
PARAMS = [SamplingParams(max_tokens=30, temperature=t, seed=i, logprobs=2) for i, t in enumerate((0.0, 0.9, 0.9))]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)


def on_gpu(model: str = STORIES, **build: Any) -> RunningModel:
    name, engine = find_engine(model, BuildSettings(**SMALL, **build), read_env(), place=DeviceId("cuda"))
    return open_engine(name, engine, RunSettings(device="cuda"))


def test_the_same_answers(here: None) -> None:
    """Of a trained model in float32, from Python and from a server: by buckets, overlapping, with cached prompts."""
    with LLM(STORIES, tune=0, **SMALL) as on_cpu:
        want = on_cpu.generate(PROMPTS, PARAMS)
    with LLM(STORIES, device="cuda", **SMALL) as llm:
        assert isinstance(llm._opened, RunningModel) and isinstance(llm._opened.executor, CudaExecutor)
        assert llm._opened.isa == HERE.name
        folder = llm._opened.engine.folder
        got = llm.generate(PROMPTS, PARAMS)
    assert not folder.exists(), "what it needed of files is gone"
    for mine, theirs in zip(got, want, strict=True):
        a, b = mine.outputs[0], theirs.outputs[0]
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
    with serving(on_gpu()) as server:
        asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 30, "temperature": 0}
        replies = [server.post("/v1/completions", asked).json() for _ in range(2)]
        assert [r["choices"][0]["text"] for r in replies] == [want[0].outputs[0].text] * 2
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        about = model["metadata"] if "metadata" in model else httpx.get(f"{server.url}/v1/metadata").json()
        assert HERE.name in str(about)


def test_the_commands(here: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--device", "cuda", "--max-batch", "2", "--max-context", "128"]
    assert run(["generate", STORIES, PROMPTS[0], "--max-tokens", "8", "--temperature", "0", *flags]) == 0
    out, told = capsys.readouterr()
    assert out.strip() and "decode 7 tokens" in told
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
    assert run(["chat", "tiny", "--max-tokens", "4", *flags]) == 0 and capsys.readouterr().out.strip()
    assert run(["bench", "--engine", STORIES, "--isl", "8", "--osl", "4", "--request-count", "3", "--device", "cuda",
                "--json"]) == 0  # fmt: skip
    assert '"whole": 3' in capsys.readouterr().out
    assert run(["bench", "http://127.0.0.1:1", "--model", "m", "--device", "cuda"]) == 2
    assert "--engine MODEL, which runs here" in capsys.readouterr().err


def test_what_is_said_of_it(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    opened = on_gpu("tiny", precision="w4a16")
    try:
        served = _to_serve(opened, ServeFlags(), QueueFlags(), (), None, read_env())
        _introduce(opened, served)
        Terminal(plain=True).welcome(opened)
    finally:
        opened.close()
    out, told = capsys.readouterr()
    assert f"w4a16 g128, lm_head w8a16, on {HERE.name}" in told and "4 sequences at a time" in told
    assert "KV cache" in told and "(4 full sequences)" in told and "w4a16 g128, lm_head w8a16" in out
    assert opened.engine.manifest.identity != on_cpu_identity() and served.metadata["isa"] == HERE.name


def on_cpu_identity() -> str:
    _, engine = find_engine("tiny", BuildSettings(tune=0), read_env())
    identity = engine.manifest.identity
    engine.close()
    return identity


def test_a_thread_goes_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one of its own: `cuda:1` was chosen in the thread that loaded the weights."""
    chosen: list[torch.device] = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        chosen.append(wanted)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    with on_device_context(torch.device("cuda:1")):
        assert chosen == [torch.device("cuda:1")]
    with on_device_context(torch.device("cpu")) as nothing:
        assert nothing is None


def test_w4a16_says_that_nobody_measured_it(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "tiny", "Once", "--precision", "w4a16", "--device", "cuda", "--max-tokens", "2"]) == 0
    assert "what w4a16 costs in answers is not measured on a GPU" in capsys.readouterr().err


def never(*_: object, **__: object) -> None:
    raise AssertionError("a weight is read")


@pytest.mark.parametrize(("gpu", "asked", "kind", "words"), [
    ((), {"precision": "fp8a16"}, ConfigError, ["A100 (Ampere, sm_80) does not multiply fp8", "has fp16, bf16, int8"]),
    ((), {"precision": "auto"}, ConfigError, ["precision=auto is given for a GPU", "millrace build"]),
    ((), {"tune_rows": "1/64"}, ConfigError, ["tune_rows is given for a GPU"]),
    ((), {"bf16_sums": "tiles"}, ConfigError, ["bf16_sums is given for a GPU"]),
    ((), {"threads": 2}, ConfigError, ["threads is given, and device is cuda"]),
    ((), {"kv_cache_dtype": "int4"}, EngineError, ["int4 on a GPU", "int8, fp8"]),
    ((), {"kv_cache_dtype": "fp32", "precision": "bf16"}, EngineError, ["fp32 on a GPU", "int8, fp8"]),
    ((), {"kv_cache_dtype": "bf16", "precision": "fp32"}, EngineError, ["bf16 on a GPU", "int8, fp8"]),
    ((), {"kv_cache_dtype": "bf16", "precision": "fp16"}, EngineError, ["bf16 of a model in fp16", "or fp16"]),
    ((), {"kv_memory": "1k"}, MachineError, ["less than one sequence takes"]),
    ((1 << 20,), {}, MachineError, ["may be used", "free memory of the GPU"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_weight_is_read(
    gpu: tuple[int, ...], asked: dict[str, Any], kind: type[MillraceError], words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    free = gpu[0] if gpu else 80 << 30
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: Gpu("cpu", "NVIDIA A100", (8, 0), free, 108))
    monkeypatch.setattr(device_constants, "load", never)
    with pytest.raises(kind) as refused:
        LLM("tiny", device="cuda", **asked)
    assert all(w in str(refused.value) for w in words), str(refused.value)


def test_too_little_memory_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the error names is asked for again, and then runs."""
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)
    _, engine = find_engine("tiny", BuildSettings(), read_env(), place=DeviceId("cuda"))
    assert isinstance(engine, GpuEngine)
    needs = engine.needs
    engine.close()
    short = replace(HERE, free_bytes=int(needs.total_bytes(needs.least_pages // 2) / SHARE) + 1)
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: short)
    with pytest.raises(MachineError) as refused:
        LLM("tiny", device="cuda")
    asked: dict[str, Any] = {
        name: int(value) for name, value in re.findall(r"(max_context|max_batch)=(\d+)", refused.value.fix)
    }
    assert asked.keys() == {"max_context", "max_batch"}
    for name, value in asked.items():
        with LLM("tiny", device="cuda", **{name: value}) as llm:
            assert llm.generate("Once", SamplingParams(max_tokens=2))[0].finished


def test_a_device_that_fails_while_it_is_loaded(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_constants, "load", failing("CUDA out of memory. Tried to allocate 2 GiB.\nMore words"))
    with pytest.raises(MachineError, match="failed while the model was loaded: CUDA out of memory") as refused:
        LLM("tiny", device="cuda", **SMALL)
    assert "More words" not in str(refused.value) and "nvidia-smi" in refused.value.fix


@pytest.fixture(scope="module")
def fp8_engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("engines") / "stories.engine")
    flags = ["--precision", "fp8", "--no-evaluate", "--max-context", "256", "--device", "H200"]
    assert run(["build", STORIES, "-o", folder, *flags]) == 0
    return folder


def test_an_engine_answers_as_its_checkpoint(here: None, fp8_engine: str) -> None:
    """Built for a GPU, and served there: the very weights, so the very answers."""
    few = SamplingParams(max_tokens=5, temperature=0.9, seed=1)
    with LLM(STORIES, device="cuda", precision="fp8", **SMALL) as llm:
        want = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:2], few)]
    with LLM(fp8_engine, device="cuda", max_batch=4) as llm:
        assert isinstance(llm._opened, RunningModel) and isinstance(llm._opened.executor, CudaExecutor)
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:2], few)] == want
        assert llm._opened.engine.manifest.precision["default"] == "fp8" and llm._opened.executor._lowered.e4m3
    assert Path(fp8_engine, "manifest.json").is_file()


@pytest.mark.parametrize(("asked", "words"), [
    ({"precision": "fp8"}, "precision is given, but .* is already built"),
    ({"random_weights": True}, "random_weights is given, but .* is already built"),
    ({"max_context": 512}, "max_context=512 .*at most 256"),
])  # fmt: skip
def test_what_an_engine_has_is_not_asked_again(asked: dict[str, Any], words: str, here: None, fp8_engine: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        LLM(fp8_engine, device="cuda", **asked)


@pytest.mark.parametrize(("device", "words"), [
    ("gpu", ['device is "gpu"', "write"]), ("cuda:", ["cpu, cuda, or cuda:1"]), ("cuda:x", ["cpu, cuda, or cuda:1"]),
])  # fmt: skip
def test_a_device_that_is_none(device: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        RunSettings(device=device)
    assert all(w in str(refused.value) for w in words)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, **fakes: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    usual = {"init": lambda: None, "device_count": lambda: 2, "current_device": lambda: 0,
             "mem_get_info": lambda i: (70 << 30, 80 << 30),
             "get_device_properties": lambda i: SimpleNamespace(name=f"NVIDIA H{i}", major=9, minor=0,
                                                                multi_processor_count=132)}  # fmt: skip
    for name, fake in {**usual, **fakes}.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def failing(why: str) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise RuntimeError(why)

    return fail


def test_a_gpu_is_found_or_one_error_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: str = "cuda") -> str:
        with pytest.raises(MachineError) as error:
            find_gpu(device)
        return str(error.value)

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in refused()
    fake_cuda(monkeypatch)
    assert find_gpu("cuda:1") == Gpu("cuda:1", "NVIDIA H1", (9, 0), 70 << 30, 132)
    assert find_gpu("cuda").device == "cuda:0"
    assert "there is no GPU cuda:3" in refused("cuda:3") and "cuda:1 (NVIDIA H1)" in refused("cuda:3")
    fake_cuda(monkeypatch, init=failing("Found no NVIDIA driver on your system.\nPlease check"))
    assert "no GPU to run on: Found no NVIDIA driver on your system." in refused() and "Please" not in refused()
    fake_cuda(monkeypatch, mem_get_info=failing("CUDA error: an illegal memory access was encountered"))
    assert "illegal memory access" in refused()

    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "triton":
                raise ImportError("libcudart.so.13: cannot open shared object file")

    with monkeypatch.context() as broken:
        broken.delitem(sys.modules, "triton", raising=False)
        broken.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        assert "PyTorch cannot be used: libcudart.so.13" in refused()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton is not installed" in refused() and "pip install 'millrace[gpu]'" in refused()


class Breaking(CudaExecutor):
    """Whose device fails for ever: when steps are launched, or when they are waited for."""

    fails_at, fails_in, n_steps = 0, "", 0

    def launch(self, step: StepInputs) -> None:
        self.n_steps += 1
        super().launch(step)
        if self.fails_in == "launch" and self.n_steps >= self.fails_at:
            self._flights.pop()
            raise torch.OutOfMemoryError("CUDA error: out of memory")

    def wait(self) -> StepOutputs:
        found = super().wait()
        if self.fails_in == "wait" and self.n_steps >= self.fails_at:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails_in", ["launch", "wait"])
def test_a_device_that_fails_in_mid_step(fails_in: str, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load, two steps under way: every request ends, with an error, and so does what comes later; the server
    says that it is not ready, is alive, and ends in an orderly way."""
    monkeypatch.setattr(executor, "CudaExecutor", Breaking)
    opened, told = on_gpu(), list[tuple[int, str]]()
    assert isinstance(opened.executor, Breaking)
    opened.executor.fails_at, opened.executor.fails_in = 12, fails_in
    with serving(opened) as server:

        def ask(i: int) -> None:
            asked = {"model": MODEL, "prompt": PROMPTS[i % 3], "max_tokens": 100, "stream": i % 2 == 0,
                     "temperature": 1}  # fmt: skip
            reply = server.post("/v1/completions", asked)
            told.append((reply.status_code, reply.text))

        assert httpx.get(f"{server.url}/v1/health/ready").status_code == 200
        clients = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(30)
        assert len(told) == 10 and all("error" in text for _, text in told), told
        assert any("CUDA error" in text for _, text in told)
        assert httpx.get(f"{server.url}/v1/health/ready").status_code == 503
        assert httpx.get(f"{server.url}/v1/health/live").status_code == 200
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "a"}).status_code == 503
        assert not server.stats().healthy and server.stats().pages_used == 0
