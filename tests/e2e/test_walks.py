"""The walks of docs/architecture.md, walked: the files that really run on a request's way, and on weights'."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from gguf import GGMLQuantizationType as Kind

import millrace
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from tests.e2e.live import live
from tests.serve.support import until
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf
from tests.support.repository import ADD_SUB, in_process, write_models

ROOT = Path(__file__).parents[2]
PACKAGE = str(Path(millrace.__file__).parent) + "/"
MOST = {"weight": 12, "stored matrix": 10}


def told(walk: str) -> list[str]:
    """The files that the document lists under this heading."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, section = text.partition(f"## The way of a {walk}")
    assert section, f"docs/architecture.md has no way of a {walk}"
    return re.findall(r"^\d+\. `([\w/.]+\.py)`", section.partition("\n## ")[0], flags=re.MULTILINE)


def named(walk: str) -> set[str]:
    """All files that the document names under this heading."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return set(re.findall(r"`([\w/]+\.py)`", text.partition(f"## The way of a {walk}")[2].partition("\n## ")[0]))


@contextmanager
def walked() -> Iterator[set[str]]:
    """The package's files of which a function is called meanwhile, in any thread."""
    files: set[str] = set()
    on = True

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if on and event == "call" and (name := frame.f_code.co_filename).startswith(PACKAGE):
            files.add(name.removeprefix(PACKAGE))

    threading.setprofile(seen)  # of threads that begin now
    sys.setprofile(seen)
    try:
        yield files
    finally:
        on = False
        sys.setprofile(None)
        threading.setprofile(None)


def test_the_way_of_a_request(tiny_engine: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4, "stream": True, "seed": 1}
    with walked() as files, live(tiny_engine) as server:
        server.post(
            "/v1/chat/completions", body
        )  # the first of its kind has the struct made that bodies are decoded to
        server.wait_until_idle()
        files.clear()
        assert server.post("/v1/chat/completions", body).status_code == 200
        server.wait_until_idle()
        way = set(files)
    listed = told("request")
    ticking = {"serve/http/uvicorn_server.py"}  # uvicorn's clock
    assert way - ticking == set(listed) and len(listed) == len(set(listed))


def test_the_way_of_a_kserve_request(tmp_path: Path) -> None:
    tensor = {"shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
    body = {"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]}
    write_models(tmp_path, {"simple": ADD_SUB})
    with walked() as files, in_process(tmp_path) as server:
        url = f"{server.url}/v2/models/simple/infer"
        assert httpx.post(url, json=body).status_code == 200  # the first request has structs made
        files.clear()
        other_head = {"x-other": "1"}  # a head that came before is not read again
        assert httpx.post(url, json=body, headers=other_head).status_code == 200
        until(lambda: "prometheus.py" in files)  # it is counted once it is sent
        way = set(files)
    assert way - {"serve/http/uvicorn_server.py"} == named("KServe request")


def test_the_way_of_a_weight(tmp_path: Path) -> None:
    """A product of several matrices: its reading and packing file by file; around it, the files that hand it on."""
    listed = told("weight")
    with walked() as deciding:
        source = Source.from_checkpoint(Checkpoint.open(BUNDLED / "tiny"))
        plan = plan_engine(source, BuildOptions(precision=precision_map("w4a8")))
    (packed,) = [p for p in plan.program.weights if "layers.0.self_attn.q_proj" in p.name]
    with walked() as packing:
        packed.pack(map)
    with walked() as handing:
        write_engine(source, plan, tmp_path / "engine", name="tiny")
        engine = Engine.open(tmp_path / "engine")
        engine.executor(n_pages=16, threads=1).close()
    before = {"model/module.py", "compile/lower_cpu/program_builder.py"}
    after = {"compile/build.py", "engine/artifact/engine.py", "engine/native/executor.py"}
    assert before <= deciding and after <= handing
    assert packing == set(listed) - before - after and len(listed) == len(set(listed)) <= MOST["weight"]


def test_the_way_of_a_stored_matrix(tmp_path: Path) -> None:
    """Integers of a file, of several matrices: their reading and packing, file by file."""
    listed = told("stored matrix")
    folder = random_checkpoint(tmp_path / "c", "llama", seed=3, **BLOCKY)
    path = write_gguf(tmp_path / "m.gguf", folder, Kind.Q4_1)
    plan = plan_engine(Source.from_checkpoint(Checkpoint.open(path)), BuildOptions())
    (packed,) = [p for p in plan.program.weights if "layers.0.self_attn.q_proj" in p.name]
    with walked() as packing:
        packed.pack(map)
    assert packing == set(listed) and len(listed) == len(set(listed)) <= MOST["stored matrix"]
