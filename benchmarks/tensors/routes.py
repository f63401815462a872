"""The same answers over three routes: OpenAI's completions, `generate_stream`, and gRPC's stream, in turn.

    python -m benchmarks.tensors.routes

SmolLM2-135M-Instruct (its Q4_1 file, as stored) is served by one process, over OpenAI's protocol and as a model of its
repository: the same engine, opened twice. Before the clock runs, clients of each protocol stream greedy answers, whose
texts must be the same. While it runs one client asks over every route: h2load (of the system's packages), over HTTP/1.1
or as gRPC, because what a client in Python costs, on the cores that the engine works on, is no server's. Needs the
extra `grpc`. Writes results/routes-TIME-COMMIT.json.
"""

import argparse
import asyncio
import json
import re
import statistics
import struct
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.names import named
from benchmarks.record import count, judged, provenance, write_result
from benchmarks.tensors.load import cpu_s, h2load_version
from benchmarks.tensors.request import GRPC_SERVICE
from millrace.bench.run.server_process import ServerProcess
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.env import read_env
from tools.nightly.packages import smollm2

USERS, NEW = (1, 16), 128
REQUESTS = 1  # at least in a sample, one after another: short ones, that those of a round see the same machine
OPENAI, GENERATE, GRPC = "OpenAI's completions", "generate_stream", "gRPC ModelStreamInfer"
MODEL, GRPC_METHOD = "llm", "ModelStreamInfer"
MAX_LESS = 0.2  # of an answer's bytes, as what frames them is not counted; an error is much shorter
WITHIN = 0.97  # of the speed over OpenAI's route
Ask = Callable[[str], Awaitable[bytes]]  # a prompt; all that came back


def prompts(users: int) -> list[str]:
    return [f"{i + 1}. Once upon a time there was a miller who" for i in range(users)]


def over_http(port: int, path: str, body: Callable[[str], Mapping[str, Any]]) -> Ask:
    """The bytes behind the head of an answer, which ends with its connection."""

    async def ask(prompt: str) -> bytes:
        content = json.dumps(body(prompt)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        told = await reader.read()
        writer.close()
        head_of, _, rest = told.partition(b"\r\n\r\n")
        assert b" 200 " in head_of, told[:500]
        return rest

    return ask


def openai_body(model: str) -> Callable[[str], Mapping[str, Any]]:
    return lambda prompt: {
        "model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip


def generate_body(prompt: str) -> Mapping[str, Any]:
    return {"text_input": prompt, "max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "stream": True}


def grpc_request(prompt: str) -> bytes:
    """ModelInferRequest of tensors of one element each."""
    from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

    values: dict[str, tuple[str, bytes]] = {
        "text_input": ("BYTES", struct.pack("<I", len(prompt.encode())) + prompt.encode()),
        "max_tokens": ("INT32", struct.pack("<i", NEW)), "temperature": ("FP32", struct.pack("<f", 0)),
        "ignore_eos": ("BOOL", b"\1"), "stream": ("BOOL", b"\1"),
    }  # fmt: skip
    made = message("ModelInferRequest")(model_name=MODEL, raw_input_contents=[raw for _, raw in values.values()])
    for name, (kind, _) in values.items():
        made.inputs.add(name=name, datatype=kind, shape=[1])
    found: bytes = made.SerializeToString()
    return found


def over_grpc(channel: Any) -> Ask:
    """Messages with their lengths in front of them."""
    call = channel.stream_stream(f"/{GRPC_SERVICE}/{GRPC_METHOD}")

    async def ask(prompt: str) -> bytes:
        stream = call(iter([grpc_request(prompt)]))
        return b"".join([struct.pack("<I", len(told)) + told async for told in stream])

    return ask


def text_of_events(told: bytes, text: Callable[[Any], str]) -> str:
    """Of server-sent events, in chunks as HTTP/1.1 sends them or not."""
    lines = [line for line in told.split(b"\n") if line.startswith(b"data: {")]
    return "".join(text(json.loads(line[6:])) for line in lines)


def text_of_messages(told: bytes) -> str:
    from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

    kind, at, found = message("ModelStreamInferResponse"), 0, []
    while at < len(told):
        (size,) = struct.unpack_from("<I", told, at)
        reply = kind.FromString(told[at + 4 : at + 4 + size])
        assert not reply.error_message, reply.error_message
        names = [output.name for output in reply.infer_response.outputs]
        found.append(reply.infer_response.raw_output_contents[names.index("text_output")][4:].decode())
        at += 4 + size
    return "".join(found)


TEXTS: Mapping[str, Callable[[bytes], str]] = {
    OPENAI: lambda told: text_of_events(told, lambda event: event["choices"][0]["text"] if event["choices"] else ""),
    GENERATE: lambda told: text_of_events(told, lambda event: event["text_output"]),
    GRPC: text_of_messages,
}


async def compared(asks: Mapping[str, Ask]) -> dict[str, int]:
    """The same texts over every route, for as many users as there are at most; bytes of the first answer over each."""
    texts, n_bytes = {}, {}
    for name, ask in asks.items():
        answers = await asyncio.gather(*map(ask, prompts(max(USERS))))
        texts[name], n_bytes[name] = [TEXTS[name](told) for told in answers], len(answers[0])
    assert len({tuple(one) for one in texts.values()}) == 1, texts
    assert all(len(text) > NEW for text in texts[OPENAI]), texts[OPENAI]
    return n_bytes


def command(name: str, users: int, urls: tuple[str, str], model: str, folder: Path) -> list[str]:
    """What asks over a route. urls: of HTTP and of gRPC, `host:port`"""
    prompt = prompts(1)[0]
    body, path, http = folder / GRPC_METHOD, f"/{GRPC_SERVICE}/{GRPC_METHOD}", urls[1]
    if name == GRPC:
        message = grpc_request(prompt)
        body.write_bytes(b"\0" + struct.pack(">I", len(message)) + message)
        flags = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    else:
        of, path, http = {
            OPENAI: (openai_body(model), "/v1/completions", urls[0]),
            GENERATE: (generate_body, f"/v2/models/{MODEL}/generate_stream", urls[0]),
        }[name]
        body = folder / path.rpartition("/")[2]
        body.write_text(json.dumps(of(prompt)))
        flags = ["--h1", "-H", "content-type: application/json"]
    counts = ["-t1", "-m1", f"-c{users}", f"-n{max(users, REQUESTS)}"]
    return ["h2load", *counts, "-d", str(body), *flags, f"http://{http}{path}"]


def seconds_of(said: str, requests: int, n_bytes: int) -> float:
    """Of what h2load said, where all was answered. n_bytes: of an answer; gRPC's errors have the status 200, too"""
    assert f"{requests} succeeded, 0 failed, 0 errored" in said, said
    came = re.search(r"^traffic: .*\((\d+)\) data$", said, re.MULTILINE)
    assert came is not None and int(came[1]) >= requests * n_bytes * (1 - MAX_LESS), (n_bytes, said)
    found = re.search(r"finished in ([0-9.]+)(us|ms|s)\b", said)
    assert found is not None, said
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def measured(
    commands: Callable[[str, int], list[str]], n_bytes: Mapping[str, int], pid: int, rounds: int
) -> list[dict[str, Any]]:
    """By number of users, the seconds of each round by route and the server's CPU seconds; the first round warms up.

    n_bytes: of an answer over each route
    """
    found = []
    for users in USERS:
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in TEXTS}
        for at in range(rounds + 1):
            for name in [*TEXTS][at % len(TEXTS) :] + [*TEXTS][: at % len(TEXTS)]:
                before = sum(cpu_s(pid))
                done = subprocess.run(commands(name, users), capture_output=True, text=True)
                cpu = sum(cpu_s(pid)) - before
                assert done.returncode == 0, done.stderr
                seconds = seconds_of(done.stdout, max(users, REQUESTS), n_bytes[name])
                if at:
                    samples[name].append({"seconds": seconds, "server_cpu_s": round(cpu, 3)})
        found.append({"users": users, "requests": max(users, REQUESTS), "samples": samples})
    return found


def goals(loads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def ratio(samples: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> float:
        """Of the two speeds, within each round."""
        pairs = zip(samples[OPENAI], samples[name], strict=True)
        return statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)

    return [
        judged(
            f"{load['users']} users: speed over {name}, of that over {OPENAI}", ratio(load["samples"], name), WITHIN,
            WITHIN,
        )
        for load in loads for name in (GENERATE, GRPC)
    ]  # fmt: skip


def run(rounds: int, folder: Path) -> dict[str, Any]:
    import grpc

    model, engine = find_engine(str(smollm2()), BuildSettings(evaluate=False), read_env())
    (folder / "models" / MODEL / "1").mkdir(parents=True)
    (folder / "models" / MODEL / "config.pbtxt").write_text('backend: "millrace"\n')
    (folder / "models" / MODEL / "1" / "engine").symlink_to(engine.folder)
    flags = ("--model-repository", str(folder / "models"), "--grpc-port", "0", "--log-level", "warning",
             "--no-prefix-cache")  # fmt: skip

    async def texts(server: ServerProcess) -> dict[str, int]:
        port = int(server.url.rpartition(":")[2])
        async with grpc.aio.insecure_channel(server.grpc_url) as channel:
            return await compared({
                OPENAI: over_http(port, "/v1/completions", openai_body(model)),
                GENERATE: over_http(port, f"/v2/models/{MODEL}/generate_stream", generate_body),
                GRPC: over_grpc(channel),
            })  # fmt: skip

    with ServerProcess(engine.folder, flags) as server:
        n_bytes = asyncio.run(texts(server))
        urls = server.url.rpartition("/")[2], server.grpc_url
        found = measured(lambda name, users: command(name, users, urls, model, folder), n_bytes, server.pid, rounds)
    return {
        **provenance("benchmarks.tensors.routes"), "model": smollm2().stem, **named(Engine.open(engine.folder)),
        "client": h2load_version(), "new": NEW, "loads": found, "goals": goals(found),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}, {NEW} tokens each, streamed"]
    for load in result["loads"]:
        for name, samples in load["samples"].items():
            rate = load["requests"] * NEW / statistics.median(s["seconds"] for s in samples)
            cpu = statistics.median(s["server_cpu_s"] for s in samples)
            lines.append(f"  {load['users']:2} users, {name}: {rate:,.0f} tokens/s; {cpu:.2f} s of the server's CPU")
    return "\n".join([*lines, *(f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"])])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensors.routes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=61, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.rounds, Path(temporary))
    path = write_result("routes", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")


if __name__ == "__main__":
    main()
