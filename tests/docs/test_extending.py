"""The pages of docs/extending, run as they say: the files are taken out of the page, and nothing is added to them."""

import asyncio
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest

from millrace import LLM, SamplingParams
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.lower_cpu.program_builder import lower
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.passes.pipeline import gpu, run_passes, unfused
from millrace.compile.precision import precision_map
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.reference.interpreter import Interpreter
from millrace.errors import GraphError
from millrace.graph.types import Graph, Operators, Symbol
from millrace.kernels import codegen
from millrace.kernels.catalogue import kernels, operators
from millrace.model.layers import Linear
from millrace.model.module import Module, Signature, Weights, trace_model
from millrace.model.tensor import Tensor
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import last_logits
from tests.support.loaded import Loaded, infer, refused
from tests.support.networks import Arrays, network
from tests.support.server import in_thread
from tests.support.tolerance import assert_no_worse

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extending"
BLOCK = re.compile(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOFTMIN = "src/millrace/kernels/softmin/"


def write(page: str, folder: Path) -> list[str]:
    """The page's files, each under the path that stands above it."""
    text = (PAGES / f"{page}.md").read_text()
    found = BLOCK.findall(text)
    assert len(found) == text.count("```") // 2 > 0, f"{page}.md has a block without the path of its file"
    for path, content in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return [path for path, _ in found]


@contextmanager
def loaded(path: Path) -> Iterator[ModuleType]:
    """As a module of its own, for dataclasses and msgspec to find."""
    name = f"page_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def reference(graph: Graph, inputs: Arrays) -> Arrays:
    plain = run_passes(graph, unfused(precision_map("fp32")))
    return dict(Interpreter(plain, kv=KvFormat.F32, bf16_table=False).run(inputs))


def test_an_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert write("activation", tmp_path) == ["relu_squared.py"]
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path("relu_squared.py", run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["matmul up", "matmul down"] and float(said[2].split()[-1]) < 1e-5
    weights, x = made["weights"], made["x"]
    traced = trace_model(
        made["MLP"](), Weights({n: w.shape for n, w in weights.items()}, weights.__getitem__), operators()
    )
    exact = reference(traced, {"x": x})["y"]
    assert_no_worse(made["y"], made["plain"], exact)
    assert np.abs(exact).max() > 0.1


def test_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="its twin is PyTorch's")
    (path,) = write("network", tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / path), run_name="__main__")
    assert float(capsys.readouterr().out.removeprefix("largest difference:")) < 1e-5
    Engine.open(tmp_path / "small_cnn.engine").close()


def test_a_family(tmp_path: Path) -> None:
    """Against transformers, and then as any other engine."""
    torch = pytest.importorskip("torch", reason="transformers needs it")
    transformers = pytest.importorskip("transformers", reason="the independent truth")
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "olmo2")
    assert write("family", tmp_path) == ["olmo2.py"]
    with loaded(tmp_path / "olmo2.py") as page:
        page.build(checkpoint, tmp_path / "engine", "fp32")
    engine = Engine.open(tmp_path / "engine")
    prompts = [[1, 17, 300, 5], list(range(2, 70)), [9]]
    executor = engine.executor(n_pages=16)
    ours = last_logits(engine, executor, prompts)
    executor.close()
    theirs, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float32, torch.float64)
    )
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            last = [model(torch.tensor([prompt])).logits[0, -1].numpy() for model in (theirs, exact)]
            assert_no_worse(ours[row], *last)
    llm = LLM(str(tmp_path / "engine"))
    answer = llm.generate("the", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0]
    llm.close()
    assert len(answer.token_ids) == 4


def test_a_tensor_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its entry point, as pip writes it of the page's pyproject.toml."""
    files = write("tensor-backend", tmp_path)
    assert files == ["pyproject.toml", "linear_backend.py", "models/score/config.pbtxt"]
    points = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "millrace_linear-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: millrace-linear\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in of.items()) for group, of in points.items())
    )
    monkeypatch.syspath_prepend(tmp_path)
    w = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    for name, array in (("score", w), ("broken", w[0])):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        np.savez(tmp_path / "models" / name / "1" / "model.npz", w=array)
    (tmp_path / "models/broken/config.pbtxt").write_text('backend: "linear"')
    (failed,) = refused(tmp_path / "models")
    assert "load failed for model 'broken'" in failed and "linear error: not enough values to unpack" in failed
    shutil.rmtree(tmp_path / "models/broken")

    async def run() -> None:
        async with Loaded(tmp_path / "models") as repository:
            x = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
            assert repository.get("score").config.max_batch_size == 4
            np.testing.assert_allclose((await infer(repository, "score", x=x))["y"], x @ w, rtol=1e-6)

    asyncio.run(run())
    sys.modules.pop("linear_backend")


class Scores(Module):
    signature = Signature({"x": ("images", 7)}, ("scores",))

    def __init__(self) -> None:
        self.linear = Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_backend(tmp_path: Path) -> None:
    assert write("backend", tmp_path) == ["digits.py", "classifier.py"]
    engine = network(Scores(), tmp_path / "engine", profile={"images": Bounds(1, 4, 8)})
    rows = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    opened = engine.stateless_executor()
    expected = opened.run({"x": rows})["scores"].argmax(axis=1).tolist()
    with loaded(tmp_path / "classifier.py") as page:
        model = page.ClassifierModel(name="digits", created=1, max_context=1, network=opened)
        protocols = (*page.PROTOCOLS, page.CLASSIFY)
        with in_thread(model, None, start_s=30, stop_s=30, protocols=protocols) as server:

            def post(body: Any) -> tuple[int, Any]:
                reply = httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)
                return reply.status_code, reply.json()

            assert post({"model": "digits", "rows": rows.tolist()}) == (200, {"model": "digits", "classes": expected})
            for body, status, says in (
                ({"model": "digit", "rows": [[1]]}, 404, '"digits"'),
                ({"rows": [[1, 2], [3]]}, 400, "rows differ in length"),
                ({"rows": [[0, 0, 0, 0, 0, 0, -1e300]]}, 400, "beyond float32"),
                ({"rows": [[1, 2]]}, 400, "the input x is float32[1, 2]"),
                ({"row": [[1, 2]]}, 400, 'did you mean "rows"?'),
            ):
                code, error = post(body)
                assert (
                    code == status == error["status"] and set(error) == {"error", "status"} and says in error["error"]
                )
            document = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/classify"]["post"]
            assert document["requestBody"]["content"]["application/json"]["example"] == {
                "model": "digits", "rows": [[0.1, 0.2]],
            }  # fmt: skip
            assert "/ClassifyError" in str(document["responses"]["400"]) and "ErrorReply" not in str(document)
            assert [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["digits"]


def test_a_backends_files_as_they_are_printed(tmp_path: Path) -> None:
    write("backend", tmp_path)
    run([sys.executable, "digits.py", "engine"], tmp_path, os.environ)
    command = [sys.executable, "-u", "classifier.py", "engine", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        assert served.stdout
        url = served.stdout.readline().strip()
        reply = httpx.post(f"{url}/v1/classify", json={"rows": [[0.5] * 64, [-1.0] * 64]}, timeout=30)
        served.terminate()
        assert served.wait(30) == 0
    classes = reply.json()["classes"]
    assert reply.status_code == 200 and len(classes) == 2 and all(0 <= c < 10 for c in classes)
    assert classes[0] != classes[1]  # a sum of weights is largest here, smallest there


class Softmin(Module):
    signature = Signature({"x": ("B", 9)}, ("y",))

    def __init__(self, heads: int = 1) -> None:
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        cut = x if self._heads == 1 else x.reshape(x.shape[0], self._heads, 9 // self._heads)
        return cut.trace.add("softmin", (cut,))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_kernel_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its declaration, its C++ as the compiler sees it, its shape rule and its reference; the whole is nightly."""
    paths = write("kernel", tmp_path)
    files = ("declare.py", "native.hpp", "op.py", "torch_ref.py")
    assert paths == [*(SOFTMIN + file for file in files), "use.py"]
    folder = tmp_path / SOFTMIN
    with loaded(folder / "declare.py") as declare, loaded(folder / "op.py") as op:
        declared, known = (*kernels(), declare.KERNEL), {**operators(), "softmin": op.SOFTMIN}
    monkeypatch.setattr(codegen, "kernels", lambda: declared)
    codegen.write(tmp_path, ROOT / "native" / "millrace.h")
    included = [tmp_path, folder.parent, ROOT / "native", ROOT / "src" / "millrace" / "kernels"]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DMILLRACE_ISA=scalar",
               '-DMILLRACE_LANES="lanes/scalar.hpp"', *(f"-I{path}" for path in included)]  # fmt: skip
    done = subprocess.run([*command, str(ROOT / "native" / "isa_unit.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_operator(known)
    check_on_gpu(known, folder / "torch_ref.py", monkeypatch)
    check_lowering(known, {param.split()[-1].partition("[")[0] for param in declare.KERNEL.params})
    compile((tmp_path / "use.py").read_text(), "use.py", "exec")


def check_operator(known: Operators) -> None:
    none = Weights({}, lambda name: np.zeros(0))
    x = np.random.default_rng(1).standard_normal((5, 9)).astype(np.float32)
    e = np.exp(-x.astype(np.float64))
    y = reference(trace_model(Softmin(), none, known), {"x": x})["y"]
    np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=1e-6)
    with pytest.raises(GraphError, match=r"softmin: x \[B, 3, 3\]"):
        trace_model(Softmin(3), none, known)


def check_on_gpu(known: Operators, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of a CPU."""
    torch = pytest.importorskip("torch", reason="GPU operators are PyTorch's")
    from millrace.engine.cuda import graph_executor
    from millrace.kernels.torch_operators import torch_operators

    with loaded(path) as page:
        every = {**torch_operators(), **page.OPERATORS}
    monkeypatch.setattr(graph_executor, "torch_operators", lambda: every)
    traced = trace_model(Softmin(), Weights({}, lambda name: np.zeros(0)), known)
    on_gpu = graph_executor.GraphExecutor(
        lower_for_gpu(run_passes(traced, gpu(precision_map("fp32"))), "fp32"), device="cpu"
    )
    x = np.random.default_rng(1).standard_normal((5, 9)).astype(np.float32)
    y = on_gpu._computed({"x": torch.from_numpy(x)})["y"].numpy()
    np.testing.assert_allclose(y, reference(traced, {"x": x})["y"], rtol=1e-5)


def check_lowering(known: Operators, params: set[str]) -> None:
    """One call of the kernel, with the parameters that it declares."""
    traced = trace_model(Softmin(), Weights({}, lambda name: np.zeros(0)), known)
    graph = run_passes(traced, unfused(precision_map("fp32")))
    (call,) = lower(graph, {Symbol("B"): Bounds(1, 4, 8)}, KvFormat.F32, "f32").calls
    assert call.kernel == "softmin" and set(call.params) == params and set(call.operands) == {"x", "y"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_kernel(tmp_path: Path) -> None:
    """A copy of the tree with the new folder, built and used."""
    tree = tmp_path / "tree"
    for folder in ("native", "src"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    write("kernel", tree)
    (tree / SOFTMIN / "__init__.py").touch()
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in (["cmake", "-G", "Ninja", "-S", ".", "-B", "build"], ["cmake", "--build", "build"]):
        run(command, tree, tools)
    shutil.copy(tree / "build" / "libmillrace.so", tree / "src" / "millrace" / "kernels")
    # -S, so that an installed package's hook does not put itself in front of the tree
    site = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), *site])}
    assert "scalar" in run([sys.executable, "-S", "use.py"], tree, environment)


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
