"""What real tensor backends cost, beside FastAPI with the same function: CPU of the server, and latency.

    python -m benchmarks.tensors.backends [--seconds 4] [--rounds 5]

A plain `model.py` that adds two vectors (in the server's process, and in one of its own) and, where it is installed, a
small network by `onnxruntime`; over HTTP, as JSON, from 1, 8 and 64 connections. Beside each FastAPI on uvicorn with a
Pydantic model and the same function (`def` and `async def`), or the same session. CPU is that of the server with all of
its processes. Servers take turns; medians of the rounds. The client is of this process, on the other core. Writes
results/backends-TIME-COMMIT.json.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import count, provenance, write_result
from benchmarks.tensors.load import CLIENT_CORE, SERVER_CORE, listening, on_core
from millrace.bench.server_process import ServerProcess

N = 16  # elements of a vector
CONNECTIONS = (1, 8, 64)
_TICKS = os.sysconf("SC_CLK_TCK")
_TENSORS = f"""
input [ {{ name: "A" data_type: TYPE_FP32 dims: [ {N} ] }}, {{ name: "B" data_type: TYPE_FP32 dims: [ {N} ] }} ]
output [ {{ name: "C" data_type: TYPE_FP32 dims: [ {N} ] }} ]
"""
_OWN = 'parameters { key: "MILLRACE_PROCESS" value { string_value: "own" } }'
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("C", a + b)]))
        return responses
"""
PEER = """
import socket, sys
import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Asked(BaseModel):
    a: list[float]
    b: list[float]


app = FastAPI()
session = None
if len(sys.argv) > 1:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(sys.argv[1], options, ["CPUExecutionProvider"])


def computed(asked):
    a, b = np.array(asked.a, np.float32), np.array(asked.b, np.float32)
    return {"c": (a + b if session is None else session.run(None, {"A": a, "B": b})[0]).tolist()}


@app.post("/def")
def plain(asked: Asked):
    return computed(asked)


@app.post("/async")
async def coroutine(asked: Asked):
    return computed(asked)


with socket.create_server(("127.0.0.1", 0)) as sock:
    print(sock.getsockname()[1], flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False,
                            log_level="warning")
    uvicorn.Server(config).run(sockets=[sock])
"""


def processes(pid: int) -> list[int]:
    """It and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [p for child in (task / "children").read_text().split() for p in processes(int(child))]
    return found


def cpu_s(pid: int) -> float:
    ticks = 0
    for process in processes(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def packet(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _asking(port: int, data: bytes, until_s: float, took_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (began_s := time.perf_counter()) < until_s:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].partition(b":")[2]))
        took_s.append(time.perf_counter() - began_s)
    writer.close()


def sample(port: int, pid: int, data: bytes, connections: int, seconds: float) -> dict[str, float]:
    took_s: list[float] = []

    async def run() -> None:
        until_s = time.perf_counter() + seconds
        await asyncio.gather(*(_asking(port, data, until_s, took_s) for _ in range(connections)))

    before = cpu_s(pid)
    with on_core(CLIENT_CORE):
        asyncio.run(run())
    cpu_us = (cpu_s(pid) - before) * 1e6 / len(took_s)
    p50, p99 = (statistics.quantiles(took_s, n=100)[i] * 1e3 for i in (49, 98))
    return {"cpu_us": round(cpu_us, 1), "p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "n": len(took_s)}


def write_repository(root: Path, network: Path | None) -> Path:
    models = {"here": f'backend: "python" {_TENSORS}', "own": f'backend: "python" {_OWN} {_TENSORS}'}
    for name, config in models.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(MODEL)
        (root / name / "config.pbtxt").write_text(config)
    if network is not None:
        (root / "onnx" / "1").mkdir(parents=True)
        (root / "onnx" / "1" / "model.onnx").write_bytes(network.read_bytes())
        (root / "onnx" / "config.pbtxt").write_text(f'backend: "onnxruntime" {_TENSORS}')
    return root


def write_network(path: Path) -> Path | None:
    """A + B, as a network; None where it cannot be made, or run."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        return None
    import onnx
    from onnx import TensorProto, helper

    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [N]) for name in "ABC")
    graph = helper.make_graph([helper.make_node("Add", ["A", "B"], ["C"])], "sum", [a, b], [c])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def peer(folder: Path, *arguments: str) -> contextlib.AbstractContextManager[tuple[int, int]]:
    """FastAPI: its process and its port."""
    (folder / "peer.py").write_text(PEER)
    return listening([sys.executable, str(folder / "peer.py"), *arguments])


def run(rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    network = write_network(folder / "model.onnx")
    repository = write_repository(folder / "models", network)
    vector = [i / 2 for i in range(N)]
    inputs = [{"name": name, "shape": [N], "datatype": "FP32", "data": vector} for name in "AB"]
    with contextlib.ExitStack() as running:
        with on_core(SERVER_CORE):
            ours = running.enter_context(ServerProcess(None, ("--model-repository", str(repository))))
        our_port = int(ours.url.rpartition(":")[2])
        pid, port = running.enter_context(peer(folder))
        asked = {"a": vector, "b": vector}
        engines: dict[str, tuple[int, int, bytes]] = {
            name: (our_port, ours.pid, packet(f"/v2/models/{name}/infer", {"inputs": inputs}))
            for name in sorted(p.name for p in repository.iterdir())
        }
        engines |= {f"fastapi {path}": (port, pid, packet(f"/{path}", asked)) for path in ("def", "async")}
        if network is not None:
            pid, port = running.enter_context(peer(folder, str(network)))
            engines |= {f"fastapi onnx {path}": (port, pid, packet(f"/{path}", asked)) for path in ("def", "async")}
        found = {n: in_turn(engines, n, rounds, seconds) for n in CONNECTIONS}
        ours.terminate()
        ours.wait()
    medians = {n: {name: _median(samples) for name, samples in of_n.items()} for n, of_n in found.items()}
    return {**provenance("benchmarks.tensors.backends"), "elements": N, "seconds": seconds, "samples": found,
            "medians": medians}  # fmt: skip


def in_turn(
    engines: Mapping[str, tuple[int, int, bytes]], connections: int, rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """The first round warms up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for i in range(rounds + 1):
        for name, (port, pid, data) in engines.items():
            one = sample(port, pid, data, connections, seconds)
            if i:
                found[name].append(one)
    return found


def _median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in samples) for key in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(said.rounds, said.seconds, Path(folder))
    for n, of_n in result["medians"].items():
        for name, one in of_n.items():
            print(f"{n:3} connections  {name:20} {one['cpu_us']:7.0f} us CPU  p50 {one['p50_ms']:.3f} ms")
    write_result("backends", result)


if __name__ == "__main__":
    main()
