"""Servers of KServe's protocol that answer with anything: what they tell of a model, of their times, of tensors."""

import asyncio
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.infer.measure import InferResults, infer, infer_plan, transport
from millrace.bench.infer.settings import LevelSettings, ModelSettings
from millrace.bench.infer.target import InferTarget
from millrace.bench.names import GRPC, HTTP
from millrace.errors import ConfigError, MachineError
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message

HEADER = "Inference-Header-Content-Length"
FOUR = struct.pack("<4f", 1, 2, 3, 4)
METADATA = {
    "name": "m", "versions": ["1"], "platform": "p", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
}  # fmt: skip
Page = str | bytes | Callable[[], bytes]


@contextmanager
def over_http(pages: Mapping[str, Page], n_json: int | None = None) -> Iterator[str]:
    """A page is found by the end of its path, an answer to an inference at `infer`; 404 for all others."""

    class Other(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            page = pages.get(self.path.rpartition("/")[2])
            body = page() if callable(page) else page.encode() if isinstance(page, str) else page or b""
            self.send_response(404 if page is None else 200)
            self.send_header("content-length", str(len(body)))
            if n_json is not None:
                self.send_header(HEADER, str(n_json))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  # as the library calls it

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def over_grpc(replies: Mapping[str, bytes]) -> Iterator[str]:
    """Bytes for each call, as they are; UNIMPLEMENTED for all others."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(lambda asked, context, reply=reply: reply)
        for name, reply in replies.items()
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def inferred(url: str, protocol: str = HTTP, batch: str = "1", levels: str = "1") -> InferResults:
    what = ModelSettings(model="m", protocol=protocol)
    load = LevelSettings(batch_size=(batch,), concurrency=(levels,), request_count=2, warmup_request_count=0)
    return asyncio.run(infer(infer_plan(url, what, load), 0))


def sent(url: str, protocol: str) -> BenchRecord:
    async def asked() -> BenchRecord:
        answer = BenchRecord()
        async with transport(InferTarget(url, "m", protocol=protocol), 1) as over:
            await over.send(over.body([]), answer)
        return answer

    return asyncio.run(asked())


# What is told of the model


def with_input(**changed: Any) -> str:
    (one,) = METADATA["inputs"]
    return json.dumps({**METADATA, "inputs": [{**one, **changed}]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "metadata, config",
    [
        (with_input(shape="1e999").replace('"1e999"', "[1e999]"), "{}"), (with_input(name="\ud800"), "{}"),
        (with_input(shape=[-1, 10**400]), "{}"), (with_input(name=7), "{}"),
        (json.dumps(METADATA), '{"max_batch_size": 1e999}'), (json.dumps(METADATA), '{"max_batch_size": -1}'),
        (json.dumps({**METADATA, "versions": [[1]]}), "{}"),
    ],
)  # fmt: skip
def test_metadata_that_is_none_over_http(metadata: str, config: str) -> None:
    with over_http({"m": metadata, "config": config}) as url, pytest.raises(MachineError, match="metadata cannot be"):
        inferred(url)


ANSWER = json.dumps({"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})
TIMES = {name: {"count": 2, "ns": 4_000_000} for name in ("queue", "compute_input", "compute_infer", "compute_output")}


def stats(n: str, ns: int) -> str:
    told = {"success": {"count": "N", "ns": ns}, **TIMES}
    one = {"inference_count": 1, "execution_count": 1, "inference_stats": told}
    return json.dumps({"model_stats": [one]}).replace('"N"', n)


@pytest.mark.parametrize("count", ["1e999", "-1e999", "1" + "0" * 400, "NaN", "3"])
def test_statistics_that_are_none_lose_no_level(count: str) -> None:
    """Of two levels the first has its times: 2 requests in 8 ms; then the counters are nonsense, or have gone back."""
    told = iter([stats("0", 0), stats("2", 8_000_000), stats("2", 8_000_000)])
    pages: dict[str, Page] = {"m": json.dumps(METADATA), "infer": ANSWER}
    pages["stats"] = lambda: next(told, stats(count, 0)).encode()
    with over_http(pages) as url:
        first, second = inferred(url, levels="1:2").points
    assert first.server is not None and (first.server.n, first.server.whole_ms) == (2, 4.0)
    assert second.server is None and first.metrics.n == second.metrics.n == 2


def test_names_cannot_steer_a_terminal_and_counts_are_bounded() -> None:
    metadata = json.dumps({**METADATA, "name": "a\x1b[2J\ud800", "platform": "b\n", "versions": [3]})
    for count, says in (("1e999", ""), ("1" + "0" * 400, ""), ("2", "2 on X\\x1b")):
        config = f'{{"max_batch_size": 8, "instance_group": [{{"kind": "KIND_X\\u001b", "count": {count}}}]}}'
        with over_http({"m": metadata, "config": config, "infer": ANSWER}) as url:
            model = inferred(url).model
        assert (model.name, model.platform, model.version) == ("a\\x1b[2J\\ud800", "b\\n", "3")
        assert model.instances == says


GARBAGE = b"\xff" * 8
TOLD = message("ModelMetadataResponse")(**METADATA).SerializeToString()
SAID = message("ModelInferResponse")(
    outputs=[{"name": "y", "datatype": "FP32", "shape": [1, 4]}], raw_output_contents=[FOUR]
).SerializeToString()


def test_what_is_no_message_over_grpc() -> None:
    with (
        over_grpc({"ModelMetadata": GARBAGE}) as url,
        pytest.raises(MachineError, match='tells nothing of the model "m": no message'),
    ):
        inferred(url, GRPC)
    replies = {"ModelMetadata": TOLD, "ModelConfig": GARBAGE, "ModelStatistics": GARBAGE, "ModelInfer": SAID}
    with over_grpc(replies) as url:
        (point,) = inferred(url, GRPC).points
    assert point.server is None and point.metrics.n == 2
    with over_grpc({**replies, "ModelInfer": GARBAGE}) as url:
        (point,) = inferred(url, GRPC).points
    assert point.metrics.failures == {"malformed": 2}


@pytest.mark.parametrize("header", ["a b:c", "x-bin:c", "x:\u00e9", "\u00e9:x", "x:\x01", "grpc-timeout:1S", "a/b:c"])
def test_headers_that_grpc_cannot_send(header: str) -> None:
    with pytest.raises(ConfigError, match="the header"):
        infer_plan("x:1", ModelSettings(model="m", protocol=GRPC, header=(header,)), LevelSettings())


def test_headers_that_grpc_can_send() -> None:
    headers = ("Authorization: Bearer a:b", "x_1.2-y:", "x-z: ~ !", "te: x", "content-type: x", "user-agent: x")
    with over_grpc({"ModelMetadata": TOLD, "ModelInfer": SAID}) as url:
        plan = infer_plan(url, ModelSettings(model="m", protocol=GRPC, header=headers), LevelSettings(request_count=1))
        (point,) = asyncio.run(infer(plan, 0)).points
    assert point.metrics.n == 1


# Answers


def output(shape: Sequence[int], datatype: str = "FP32", size: int | None = None, **more: Any) -> dict[str, Any]:
    told = {"name": "y", "datatype": datatype, "shape": shape, **more}
    return told if size is None else {**told, "parameters": {"binary_data_size": size}}


def over_http_answered(outputs: Sequence[dict[str, Any]], raw: bytes) -> BenchRecord:
    head = json.dumps({"outputs": outputs}).encode()
    with over_http({"infer": head + raw}, len(head)) as url:
        return sent(url, HTTP)


@pytest.mark.parametrize(
    "outputs, raw",
    [
        ([output([1, 4], size=16)], FOUR), ([output([4], size=16), output([0, 9], size=0)], FOUR),
        ([output([], "BOOL", 1)], b"\1"), ([output([2], "BYTES", 9)], b"\0\0\0\0\1\0\0\0a"),
        ([output([0], "BYTES", 0)], b""), ([output([2, 2], data=[[1, 2], [3, 4]])], b""),
        ([output([4], data=[1, 2, 3, 4])], b""), ([output([2, 0], data=[[], []])], b""), ([output([0], data=[])], b""),
        ([output([2], "BYTES", data=["a,b", ",]"])], b""), ([output([1], "BYTES", data=[""])], b""),
        ([output([1, 4], size=16), output([1], data=[7])], FOUR),
    ],
)  # fmt: skip
def test_answers_over_http_that_agree_with_themselves(outputs: list[dict[str, Any]], raw: bytes) -> None:
    answer = over_http_answered(outputs, raw)
    assert (answer.failure, answer.detail) == (None, "")


@pytest.mark.parametrize(
    "outputs, raw",
    [
        ([], b""), ([output([4], size=-16), output([4], size=32)], FOUR), ([output([-4], "NOPE", 0)], b""),
        ([output([4], "NOPE", 16)], FOUR), ([output([-4, -1], size=16)], FOUR), ([output([5], size=16)], FOUR),
        ([output([4], "FP64", 16)], FOUR), ([output([1, 4], size=0)], b""), ([output([2**70, 0], size=0)], b""),
        ([output([1] * 33, size=4)], FOUR[:4]), ([output([5], "BYTES", 16)], FOUR),
        ([output([0], "BYTES", 4)], b"ab12"),
        ([output([0], "BYTES", data=["a"])], b""), ([output([1], data=[])], b""), ([output([2], data=[[], []])], b""),
        ([output([99], data=[])], b""), ([output([99], "BYTES", data=[])], b""), ([output([3], data=[1, 2])], b""),
        ([output([1], data=[1, 2])], b""), ([output([1], data=7)], b""), ([output([1], data=None)], b""),
        ([output([2], "BYTES", data=["a"])], b""), ([output([4])], b""), ([output([4], size=16)], FOUR[:-1]),
        ([output([1, 4], size=16), output([3], data=[])], FOUR),
    ],
)  # fmt: skip
def test_answers_over_http_that_contradict_themselves(outputs: list[dict[str, Any]], raw: bytes) -> None:
    assert over_http_answered(outputs, raw).failure == Failure.MALFORMED


def over_grpc_answered(outputs: Sequence[dict[str, Any]], raw: Sequence[bytes] = ()) -> BenchRecord:
    reply = message("ModelInferResponse")(outputs=outputs, raw_output_contents=raw).SerializeToString()
    with over_grpc({"ModelInfer": reply}) as url:
        return sent(url, GRPC)


def test_answers_over_grpc_that_agree_with_themselves() -> None:
    listed = [
        ("BOOL", "bool"), ("INT8", "int"), ("INT16", "int"), ("INT32", "int"), ("INT64", "int64"), ("UINT8", "uint"),
        ("UINT16", "uint"), ("UINT32", "uint"), ("UINT64", "uint64"), ("FP32", "fp32"), ("FP64", "fp64"),
    ]  # fmt: skip
    outputs = [output([1, 2], datatype, contents={f"{field}_contents": [1, 0]}) for datatype, field in listed]
    strings = output([2], "BYTES", contents={"bytes_contents": [b"", b"a"]})
    for answer in (
        over_grpc_answered([*outputs, strings, output([0])]),
        over_grpc_answered([output([1, 4]), output([0]), output([3], "FP16")], [FOUR, b"", b"abcdef"]),
    ):
        assert (answer.failure, answer.detail) == (None, "")


@pytest.mark.parametrize(
    "outputs, raw",
    [
        ([output([4])], []), ([output([4])], [b"abc"]), ([output([4], "NOPE")], [FOUR]), ([output([-4])], [FOUR]),
        ([output([4]), output([4])], [FOUR]), ([output([4]), output([4])], [FOUR, b""]), ([], []),
        ([output([2], contents={"int64_contents": [1, 2]})], []), ([output([2], contents={"fp32_contents": [1]})], []),
        ([output([2], "FP16", contents={"fp32_contents": [1, 2]})], []), ([output([-1, -1])], [FOUR[:4]]),
    ],
)  # fmt: skip
def test_answers_over_grpc_that_contradict_themselves(outputs: list[dict[str, Any]], raw: list[bytes]) -> None:
    assert over_grpc_answered(outputs, raw).failure == Failure.MALFORMED


@pytest.mark.parametrize("config, n_failed", [({"max_batch_size": 8}, 2), (None, 0)])
@pytest.mark.parametrize("protocol", [HTTP, GRPC])
def test_a_batch_is_answered_whole(protocol: str, config: dict[str, Any] | None, n_failed: int) -> None:
    """One item comes back for a batch of two: no inference, where the model is known to have the batch in front."""
    if protocol == HTTP:
        pages: dict[str, Page] = {"m": json.dumps(METADATA), "infer": ANSWER}
        with over_http(pages if config is None else {**pages, "config": json.dumps(config)}) as url:
            done = [inferred(url, batch=n).points[0].metrics for n in ("2", "1")]
    else:
        replies = {"ModelMetadata": TOLD, "ModelInfer": SAID}
        told = message("ModelConfigResponse")(config=config).SerializeToString()
        with over_grpc(replies if config is None else {**replies, "ModelConfig": told}) as url:
            done = [inferred(url, GRPC, n).points[0].metrics for n in ("2", "1")]
    assert [metrics.n_failed for metrics in done] == [n_failed, 0]
    assert done[0].failures == ({"malformed": 2} if n_failed else {})
