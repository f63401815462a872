"""What a request to a tensor model costs, beside services written by hand for that one model.

    python -m benchmarks.tensors

add_sub, FP32[1, 16]: `millrace serve --model-repository` as it comes, its access log included, and beside it, in turn,
FastAPI on uvicorn (HTTP) and grpcio's server for asyncio (gRPC) with the same arithmetic on the same bytes
(`peers.py`); over HTTP once more with another `id` in each request, which FastAPI does not read. Servers have one core,
the client (wrk, h2load; both of the system's packages) the other. All answers are compared byte by byte before anything
is timed. Needs the extra `peers`. Writes results/tensors-TIME-COMMIT.json.
"""

import argparse
import json
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.record import count, judged, provenance, write_result
from benchmarks.tensors import request
from benchmarks.tensors.inside import in_process
from benchmarks.tensors.load import (
    CONNECTIONS,
    SERVER_CORE,
    Sample,
    grpc_load,
    http_load,
    numbered_load,
    on_core,
    peer,
    versions,
)  # fmt: skip
from millrace.bench.run.server_process import ServerProcess

OURS, HTTP_PEER, GRPC_PEER = "millrace", "fastapi", "grpcio"
Timed = Callable[[], Sample]


def run(rounds: int, seconds: int, folder: Path) -> dict[str, Any]:
    repository = request.write_repository(folder / "models")
    headers, body = request.http_request()
    frame = request.framed(request.grpc_request())
    with ExitStack() as running:
        flags = ("--model-repository", str(repository), "--grpc-port", "0")
        with on_core(SERVER_CORE):
            ours = running.enter_context(ServerProcess(None, flags))
        http_pid, http_port = running.enter_context(peer("http"))
        grpc_pid, grpc_port = running.enter_context(peer("grpc"))
        our_http, our_grpc = (int(address.rpartition(":")[2]) for address in (ours.url, ours.grpc_url))
        same_answers((our_http, http_port), (our_grpc, grpc_port))
        http = in_turn(rounds, {
            OURS: lambda: http_load(our_http, ours.pid, headers, body, seconds, folder),
            HTTP_PEER: lambda: http_load(http_port, http_pid, headers, body, seconds, folder),
        })  # fmt: skip
        numbered = in_turn(rounds, {
            OURS: lambda: numbered_load(our_http, ours.pid, headers, body, seconds, folder),
            HTTP_PEER: lambda: numbered_load(http_port, http_pid, headers, body, seconds, folder),
        })  # fmt: skip
        grpc = in_turn(rounds, {
            OURS: lambda: grpc_load(our_grpc, ours.pid, frame, seconds, folder),
            GRPC_PEER: lambda: grpc_load(grpc_port, grpc_pid, frame, seconds, folder),
        })  # fmt: skip
        ours.terminate()
        ours.wait()
    with on_core(SERVER_CORE):
        inside = in_process(repository, rounds)
    return {
        **provenance("benchmarks.tensors"), "model": "add_sub FP32[1, 16]", "connections": CONNECTIONS,
        "seconds": seconds, "versions": versions(), "http": http, "http, an id each": numbered, "grpc": grpc,
        "in_process": inside, "goals": goals(http, numbered, grpc, inside),
    }  # fmt: skip


def in_turn(rounds: int, engines: Mapping[str, Timed]) -> dict[str, list[dict[str, float]]]:
    """Samples by engine, one of each a round, in the other order every second time; the first round warms up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for i in range(rounds + 1):
        for name in [*engines][:: 1 if i % 2 else -1]:
            sample = engines[name]()
            if i:
                found[name].append(sample.told())
    return found


def same_answers(http: Sequence[int], grpc: Sequence[int]) -> None:
    """Of all servers, by their ports, to the measured request: the right one, byte by byte."""
    headers, body = request.http_request()
    for port in http:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}{request.HTTP_PATH}", body, headers)
        with urllib.request.urlopen(asked, timeout=20) as reply:
            n, told = int(reply.headers["inference-header-content-length"]), reply.read()
        assert told[n:] == b"".join(request.outputs()), f"port {port} answers {told!r}"
        assert told[:n] == _head_of(request.outputs()), f"port {port} answers {told!r}"
    import grpc as library

    _, answered = request.message_classes()
    for port in grpc:
        with library.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(f"/{request.GRPC_SERVICE}/{request.GRPC_METHOD}")
            found = answered.FromString(call(request.grpc_request(), timeout=20))
        assert tuple(found.raw_output_contents) == request.outputs(), f"port {port} answers {found}"
        said = [(o.name, o.datatype, list(o.shape)) for o in found.outputs]
        assert said == [(name, "FP32", [1, request.DIMS]) for name in ("OUTPUT0", "OUTPUT1")], found


def _head_of(outputs: Sequence[bytes]) -> bytes:
    """What Triton's protocol says of such an answer."""
    told = [
        {"name": f"OUTPUT{i}", "datatype": "FP32", "shape": [1, request.DIMS],
         "parameters": {"binary_data_size": len(data)}}
        for i, data in enumerate(outputs)
    ]  # fmt: skip
    answer = {"model_name": request.NAME, "model_version": "1", "outputs": told}
    return json.dumps(answer, separators=(",", ":")).encode()


def goals(http: Any, numbered: Any, grpc: Any, inside: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    beyond = [one["request_us"] - one["backend_us"] for one in inside]
    return [
        judged("requests/s over HTTP, of FastAPI's", ratio(http, HTTP_PEER), 2.2, 1.4),
        judged("CPU of a request over HTTP outside the kernel, us", median(http[OURS], "user_us"), 30, 30,
               at_most=True),
        judged("requests/s over HTTP with an id each, of FastAPI's", ratio(numbered, HTTP_PEER), 2.2, 1.4),
        judged("CPU of a request over HTTP with an id each, outside the kernel, us", median(numbered[OURS], "user_us"),
               30, 30, at_most=True),
        judged("calls/s over gRPC, of grpcio's own server", ratio(grpc, GRPC_PEER), 0.95, 0.95),
        judged("CPU of a request in process beyond its arithmetic, us", statistics.median(beyond), 20, 20,
               at_most=True),
    ]  # fmt: skip


def ratio(of: Mapping[str, Sequence[Mapping[str, float]]], other: str) -> float:
    """Ours to the other's, within each round."""
    return statistics.median(a["per_s"] / b["per_s"] for a, b in zip(of[OURS], of[other], strict=True))


def median(samples: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(sample[name] for sample in samples)


def summary(result: dict[str, Any]) -> str:
    lines = [f"add_sub FP32[1, 16], {result['connections']} connections"]
    for protocol in ("http", "http, an id each", "grpc"):
        for name, samples in result[protocol].items():
            rate, user, system = (median(samples, what) for what in ("per_s", "user_us", "system_us"))
            lines.append(f"  {protocol} {name:8}: {rate:,.0f}/s; CPU {user:.0f} us, in the kernel {system:.0f} us")
    lines += [f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=count, default=3, help="of one load; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.rounds, args.seconds, Path(temporary))
    path = write_result("tensors", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")


if __name__ == "__main__":
    main()
