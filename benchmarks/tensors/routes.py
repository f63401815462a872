"""The same answers over three routes: OpenAI's completions, `generate_stream`, and gRPC's stream, in turn.

    python -m benchmarks.tensors.routes

SmolLM2-135M-Instruct (its Q4_1 file, as stored) is served by one process, over OpenAI's protocol and as a model of its
repository: the same engine, opened twice. Clients stream greedy answers, all at once, in asyncio in this process, and
look at nothing but the end while the clock runs; the texts are compared afterwards. Clients, server and engine share
the cores. Needs the extra `grpc`. Writes results/routes-TIME-COMMIT.json.
"""

import argparse
import asyncio
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.names import named
from benchmarks.record import count, judged, provenance, write_result
from benchmarks.tensors.load import cpu_s
from millrace.bench.server_process import ServerProcess
from millrace.compile.find import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.engine import Engine
from millrace.env import read_env
from tools.nightly.packages import smollm2

USERS, NEW = (1, 16), 128
OPENAI, GENERATE, GRPC = "OpenAI's completions", "generate_stream", "gRPC ModelStreamInfer"
MODEL = "llm"
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
    from millrace.serve.kserve.messages import message

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
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

    async def ask(prompt: str) -> bytes:
        stream = call(iter([grpc_request(prompt)]))
        return b"".join([struct.pack("<I", len(told)) + told async for told in stream])

    return ask


def text_of_events(told: bytes, text: Callable[[Any], str]) -> str:
    """Of server-sent events, in chunks as HTTP/1.1 sends them or not."""
    lines = [line for line in told.split(b"\n") if line.startswith(b"data: {")]
    return "".join(text(json.loads(line[6:])) for line in lines)


def text_of_messages(told: bytes) -> str:
    from millrace.serve.kserve.messages import message

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


async def measured(asks: Mapping[str, Ask], pid: int, rounds: int) -> list[dict[str, Any]]:
    """By number of users, the seconds of each round by route and the server's CPU seconds; the first round warms up."""
    found = []
    for users in USERS:
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in asks}
        for at in range(rounds + 1):
            order = [*asks][at % len(asks) :] + [*asks][: at % len(asks)]
            texts: dict[str, list[str]] = {}
            for name in order:
                before, began_s = sum(cpu_s(pid)), time.perf_counter()
                told = await asyncio.gather(*map(asks[name], prompts(users)))
                seconds, cpu = time.perf_counter() - began_s, sum(cpu_s(pid)) - before
                texts[name] = [TEXTS[name](one) for one in told]
                if at:
                    samples[name].append({"seconds": seconds, "server_cpu_s": round(cpu, 3)})
            assert len({tuple(one) for one in texts.values()}) == 1, texts
            assert all(len(text) > NEW for text in texts[OPENAI]), texts[OPENAI]
        found.append({"users": users, "samples": samples})
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

    async def loads(server: ServerProcess) -> list[dict[str, Any]]:
        port = int(server.url.rpartition(":")[2])
        async with grpc.aio.insecure_channel(server.grpc_url) as channel:
            asks = {
                OPENAI: over_http(port, "/v1/completions", openai_body(model)),
                GENERATE: over_http(port, f"/v2/models/{MODEL}/generate_stream", generate_body),
                GRPC: over_grpc(channel),
            }
            return await measured(asks, server.pid, rounds)

    with ServerProcess(engine.folder, flags) as server:
        found = asyncio.run(loads(server))
    return {
        **provenance("benchmarks.tensors.routes"), "model": smollm2().stem, **named(Engine.open(engine.folder)),
        "new": NEW, "loads": found, "goals": goals(found),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}, {NEW} tokens each, streamed"]
    for load in result["loads"]:
        for name, samples in load["samples"].items():
            rate = load["users"] * NEW / statistics.median(s["seconds"] for s in samples)
            cpu = statistics.median(s["server_cpu_s"] for s in samples)
            lines.append(f"  {load['users']:2} users, {name}: {rate:,.0f} tokens/s; {cpu:.2f} s of the server's CPU")
    return "\n".join([*lines, *(f"  {g['what']}: {g['reached']} ({g['verdict']})" for g in result["goals"])])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensors.routes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=7, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.rounds, Path(temporary))
    path = write_result("routes", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")


if __name__ == "__main__":
    main()
