"""What real tensor backends cost, beside FastAPI and grpcio with the same function: CPU of the server, and latency.

    python -m benchmarks.tensors.backends [--seconds 2] [--rounds 5] [--connections 1 8 64]

The models of `backend_models.py`: a plain `model.py` that adds two vectors (in the server's process, and in one of its
own), an ensemble of two of them, a small network by ONNX Runtime and by OpenVINO where they are installed, and the
bundled language model; over HTTP as JSON, and over gRPC with raw tensors, from 1, 8 and 64 connections. CPU is that of
the server with all of its processes. Servers take turns; medians of the rounds. The client is of this process, on the
other core. Writes results/backends-TIME-COMMIT.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import count, judged, provenance, write_result
from benchmarks.tensors.backend_models import MODELS, TEXT, TOKENS, N, write_repository
from benchmarks.tensors.load import CLIENT_CORE, SERVER_CORE, on_core
from benchmarks.tensors.request import GRPC_METHOD, GRPC_SERVICE, message_classes
from millrace.bench.run.server_process import ServerProcess

CONNECTIONS = (1, 8, 64)
_TICKS = os.sysconf("SC_CLK_TCK")
_STOP_S = 20


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


Asking = Callable[[float, list[float]], Awaitable[None]]  # until when; how long each request took, in seconds


@dataclass(frozen=True, slots=True)
class Target:
    """One server's way to one function."""

    pid: int
    ask: Asking


def packet(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def over_http(port: int, path: str, body: object) -> Asking:
    data = packet(path, body)

    async def ask(until_s: float, took_s: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began_s := time.perf_counter()) < until_s:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].partition(b":")[2]))
            took_s.append(time.perf_counter() - began_s)
        writer.close()

    return ask


def over_grpc(port: int, name: str) -> Asking:
    """With a channel, and so a connection, of its own."""
    import grpc

    asked, _ = message_classes()
    vector = vectors().tobytes()
    made = asked(model_name=name, raw_input_contents=[vector, vector])
    for side in "AB":
        made.inputs.add(name=side, datatype="FP32", shape=[N])
    data = made.SerializeToString()

    async def ask(until_s: float, took_s: list[float]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
            while (began_s := time.perf_counter()) < until_s:
                await call(data)
                took_s.append(time.perf_counter() - began_s)

    return ask


def vectors() -> Any:
    return np.arange(N, dtype=np.float32) / 2


def sample(target: Target, connections: int, seconds: float) -> dict[str, float]:
    took_s: list[float] = []

    async def run() -> None:
        until_s = time.perf_counter() + seconds
        await asyncio.gather(*(target.ask(until_s, took_s) for _ in range(connections)))

    before = cpu_s(target.pid)
    with on_core(CLIENT_CORE):
        asyncio.run(run())
    cpu_us = (cpu_s(target.pid) - before) * 1e6 / len(took_s)
    p50, p99 = (statistics.quantiles(took_s, n=100)[i] * 1e3 for i in (49, 98)) if len(took_s) > 1 else took_s * 2
    return {"cpu_us": round(cpu_us, 1), "p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "n": len(took_s)}


def peer_targets(function: str, network: Path, running: contextlib.ExitStack) -> dict[str, Target]:
    command = [sys.executable, "-m", "benchmarks.tensors.backend_models", function, str(network)]
    pid, http, grpc = running.enter_context(peer(command))
    if function == "llm":
        return {"fastapi def, llm": Target(pid, over_http(http, "/def", {"text_input": TEXT, "max_tokens": TOKENS}))}
    body = {"a": vectors().tolist(), "b": vectors().tolist()}
    found = {f"fastapi {p}, {function}": Target(pid, over_http(http, f"/{p}", body)) for p in ("def", "async")}
    return found | {f"grpcio, {function}": Target(pid, over_grpc(grpc, function))}


@contextlib.contextmanager
def peer(command: list[str]) -> Any:
    """Its process, and its ports of HTTP and gRPC."""
    import subprocess

    with on_core(SERVER_CORE), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            http, grpc = map(int, process.stdout.readline().split())
            yield process.pid, http, grpc
        finally:
            process.terminate()
            process.wait(_STOP_S)


def our_targets(names: list[str], pid: int, http: int, grpc: int) -> dict[str, Target]:
    inputs = [{"name": s, "shape": [N], "datatype": "FP32", "data": vectors().tolist()} for s in "AB"]
    found = {}
    for name in names:
        if MODELS[name] == "llm":
            body = {"text_input": TEXT, "max_tokens": TOKENS, "temperature": 0}
            found[f"{name}, http"] = Target(pid, over_http(http, f"/v2/models/{name}/generate", body))
        else:
            body = {"inputs": inputs}
            found[f"{name}, http"] = Target(pid, over_http(http, f"/v2/models/{name}/infer", body))
            found[f"{name}, grpc"] = Target(pid, over_grpc(grpc, name))
    return found


def function_of(target: str) -> str:
    """What it computes: targets of the same function are measured one after the other."""
    what, other = target.split(", ")
    return MODELS.get(what, other)


def run(rounds: int, seconds: float, connections: Sequence[int], folder: Path) -> dict[str, Any]:
    network = folder / "model.onnx"
    names = write_repository(folder / "models", network)
    with contextlib.ExitStack() as running:
        with on_core(SERVER_CORE):
            arguments = ("--model-repository", str(folder / "models"), "--grpc-port", "0")
            ours = running.enter_context(ServerProcess(None, arguments))
        http, grpc = (int(url.rpartition(":")[2]) for url in (ours.url, ours.grpc_url))
        targets = our_targets(names, ours.pid, http, grpc)
        functions = [*dict.fromkeys(MODELS[name] for name in names)]
        for function in functions:
            targets |= peer_targets(function, network, running)
        targets = dict(sorted(targets.items(), key=lambda one: functions.index(function_of(one[0]))))
        found = {n: in_turn(targets, n, rounds, seconds) for n in connections}
        ours.terminate()
        ours.wait()
    medians = {n: {name: _median(samples) for name, samples in of_n.items()} for n, of_n in found.items()}
    return {**provenance("benchmarks.tensors.backends"), "elements": N, "seconds": seconds, "samples": found,
            "medians": medians, "goals": goals(found)}  # fmt: skip


def goals(samples: Mapping[int, Mapping[str, Sequence[Mapping[str, float]]]]) -> list[dict[str, Any]]:
    """CPU a request over HTTP, of that of FastAPI at its best; ratios are taken within a round."""
    found = []
    for model, goal, milestone in (("python", 0.6, 1.0), ("onnxruntime", 1.1, 1.1)):
        for n, of_n in samples.items():
            ours = of_n.get(f"{model}, http")
            peers = [of_n[name] for name in of_n if name.startswith("fastapi") and name.endswith(f" {MODELS[model]}")]
            if ours is None or not peers:
                continue
            ratios = [one["cpu_us"] / min(p[i]["cpu_us"] for p in peers) for i, one in enumerate(ours)]
            what = f"backend {model}, {n} connections: CPU of the server a request over HTTP, of FastAPI's"
            found.append(judged(what, statistics.median(ratios), goal, milestone, at_most=True))
    return found


def in_turn(
    targets: Mapping[str, Target], connections: int, rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """The first round warms up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for i in range(rounds + 1):
        for name, target in targets.items():
            one = sample(target, connections, seconds)
            if i:
                found[name].append(one)
    return found


def _median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in samples) for key in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=count, nargs="+", default=CONNECTIONS)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(said.rounds, said.seconds, said.connections, Path(folder))
    for n, of_n in result["medians"].items():
        for name, one in of_n.items():
            print(f"{n:3} connections  {name:24} {one['cpu_us']:7.0f} us CPU  p50 {one['p50_ms']:.3f} ms")
    for goal in result["goals"]:
        print(f"{goal['what']}: {goal['reached']} ({goal['verdict']})")
    write_result("backends", result)


if __name__ == "__main__":
    main()
