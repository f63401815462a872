"""What Triton's users suffer from, one test each, with the number that ../shared/anchors/server.md gives it.

Each is short and real; what it is about is tested more widely where it lives. Those of processes, memory and keys are
in test_pains_of_triton_operators.py.
"""

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from millrace.api.llm import LLM
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from millrace.model_repository.backends.identity import _Identity
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.serve.http.sockets import bind
from millrace.serve.settings import ServerSettings
from tests.e2e.live import Live
from tests.e2e.triton_users import Unix, becomes
from tests.support.ensembles import ensemble
from tests.support.kserve import HEADER, binary, infer
from tests.support.kserve_grpc import connected, request
from tests.support.kserve_grpc import one as grpc_one
from tests.support.prometheus import series
from tests.support.python_models import ANY, HEAD, SAY, write
from tests.support.repository import ADD_SUB, REPEAT, identity, in_process, serving, write_models

LOOKS_UP = """
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        import pathlib, time
        word = requests[0].inputs()[0].as_numpy()[0].decode()
        pathlib.Path(self.folder, "began " + word).touch()
        for _ in range(1000):
            if requests[0].is_cancelled():
                pathlib.Path(self.folder, "left " + word).touch()
                break
            time.sleep(0.01)
        return [said("x")]
"""


def test_07_whoever_disconnects_cancels_nothing(tmp_path: Path) -> None:
    """Whose connection is gone, whatever was asked over it, or whose call was cancelled: the model is told soon."""
    kinds = ("infer", "generate", "generate_stream", "gRPC")
    write(tmp_path, "m", HEAD + LOOKS_UP + SAY, ANY % f"instance_group {{ kind: KIND_CPU count: {len(kinds)} }}")

    def all_are(what: str) -> bool:
        return all((tmp_path / "m" / f"{what} {kind}").exists() for kind in kinds)

    with in_process(tmp_path, grpc_port=0) as served, ExitStack() as connections:
        host, port = served.url.removeprefix("http://").split(":")
        for kind in kinds[:3]:
            asked: dict[str, Any] = {"IN": [kind]}
            if kind == "infer":
                asked = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [kind]}]}
            body = json.dumps(asked)
            head = f"POST /v2/models/m/{kind} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client = connections.enter_context(socket.create_connection((host, int(port))))
            client.sendall((head + body).encode())
        grpc_client = connections.enter_context(connected(served.grpc_url))
        given = request("m", [grpc_one("BYTES", [1], "IN")], [b"\x04\0\0\0gRPC"])
        connections.callback(grpc_client.future("ModelInfer", given).cancel)
        becomes(lambda: all_are("began"))
        connections.close()
        becomes(lambda: all_are("left"), 3)


def test_08_no_stream_over_http(tmp_path: Path) -> None:
    """A decoupled model's responses while they come, each as it is there."""
    with serving(write_models(tmp_path, {"repeat": REPEAT})) as url:
        body, came_s = {"IN": [1, 2, 3], "DELAY": [0, 150, 150], "WAIT": 0}, []
        with httpx.stream("POST", f"{url}/v2/models/repeat/generate_stream", json=body) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = []
            for line in reply.iter_lines():
                if line:
                    events.append(json.loads(line.removeprefix("data: "))["OUT"])
                    came_s.append(time.monotonic())
        assert events == [1, 2, 3] and came_s[2] - came_s[0] > 0.2


def test_08_no_stream_over_infer_itself(tmp_path: Path) -> None:
    """Whoever accepts events, or lines, gets a decoupled model's responses as they come; others are refused."""
    body = {"id": "7", "inputs": [{"name": "IN", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]},
                                  {"name": "DELAY", "datatype": "UINT32", "shape": [3], "data": [0, 150, 150]},
                                  {"name": "WAIT", "datatype": "UINT32", "shape": [1], "data": [0]}],
            "outputs": [{"name": "OUT"}]}  # fmt: skip
    with serving(write_models(tmp_path, {"repeat": REPEAT})) as url:
        for kind, front in (("text/event-stream", "data: "), ("application/x-ndjson", "")):
            told, came_s = [], []
            with httpx.stream("POST", f"{url}/v2/models/repeat/infer", json=body, headers={"accept": kind}) as reply:
                assert reply.headers["content-type"].split(";")[0] == kind
                for line in reply.iter_lines():
                    if line:
                        told.append(json.loads(line.removeprefix(front)))
                        came_s.append(time.monotonic())
            assert came_s[2] - came_s[0] > 0.2
            one = {"name": "OUT", "datatype": "INT32", "shape": [1]}
            known = {"id": "7", "model_name": "repeat", "model_version": "1"}
            assert told == [{**known, "outputs": [{**one, "data": [i]}]} for i in (1, 2, 3)]
        assert infer(url, "repeat", body).status_code == 501, "as in Triton, where nobody says otherwise"


def test_09_only_cumulative_counters(tmp_path: Path) -> None:
    """What p99 needs, of each phase, without a flag: of 20 requests one waits for 300 ms, and its bucket says so."""
    more = "max_batch_size: 4 dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 300000 }"
    with serving(write_models(tmp_path, {"m": identity("FP32", "1", more)})) as url:
        for n in (4,) * 19 + (1,):
            one = {"name": "INPUT0", "datatype": "FP32", "shape": [n, 1], "data": [1.0] * n}
            assert infer(url, "m", {"inputs": [one]}).status_code == 200
        found: dict[tuple[str, str], float] = {}
        for name, labels, value in series(url):
            if name.endswith("_duration_histogram_us_bucket"):
                phase = name.removeprefix("nv_inference_").removesuffix("_duration_histogram_us_bucket")
                found[phase, labels["le"]] = value
    phases = {phase for phase, _ in found}
    assert phases == {"request", "queue", "compute_input", "compute_infer", "compute_output"}
    assert all(found[phase, "+Inf"] == 20 for phase in phases)
    bounds_us = [float(le) for phase, le in found if phase == "queue" and le != "+Inf"]
    quick, slow = max(b for b in bounds_us if b <= 200_000), min(b for b in bounds_us if b >= 400_000)
    for phase, n in (("queue", 19), ("request", 19), ("compute_infer", 20)):
        assert found[phase, f"{quick:g}"] == n, (phase, found)
        assert found[phase, f"{slow:g}"] == 20


def test_10_why_is_it_not_batching(tmp_path: Path) -> None:
    """Of each batch its size, and why no more were in it: in the statistics, and as metrics."""
    more = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 30000 }"
    models = {"m": identity("FP32", "1", more, "").replace('"identity"', '"identity" parameters { key: '
              '"execute_delay_ms" value { string_value: "20" } }')}  # fmt: skip
    with serving(write_models(tmp_path, models)) as url:
        one = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
        for _ in range(20):  # a busy machine may send the four of a batch apart
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda _: infer(url, "m", {"inputs": [one]}), range(8)))
            infer(url, "m", {"inputs": [one]})
            (told,) = httpx.get(f"{url}/v2/models/m/stats").json()["model_stats"]
            if told["batch_closed"].keys() >= {"full", "delay"}:
                break
        assert told["batch_closed"]["full"] >= 1 and told["batch_closed"]["delay"] >= 1, told["batch_closed"]
        assert {b["batch_size"] for b in told["batch_stats"]} >= {1, 4}
        metrics = httpx.get(f"{url}/metrics").text
        assert re.search(r'millrace:batches_closed\{model="m",version="1",closed="full"\} [1-9]', metrics)


def test_11_shapes_and_typing_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error has its line, its column and the right word; a shape the whole one that is expected."""
    from click.testing import CliRunner

    from millrace.cli.main import cli

    write_models(tmp_path, {"m": ADD_SUB.replace("max_batch_size: 8", "\nmax_batchsize: 8")})
    told = CliRunner().invoke(cli, ["lint", str(tmp_path)]).output
    assert re.search(r"m/config.pbtxt:2:1: error: .max_batchsize. is no field", told), told
    assert 'did you mean "max_batch_size"?' in told
    right = ADD_SUB.replace("max_batch_size: 8", "max_batch_size: 16")
    with serving(write_models(tmp_path / "right", {"m": right})) as url:
        inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [16], "data": [0] * 16} for i in (0, 1)]
        error = infer(url, "m", {"inputs": inputs}).json()["error"]
        assert "unexpected shape for input 'INPUT0' for model 'm'. Expected [-1,16], got [16]." in error
        assert "a batch dimension to be prepended" in error


@pytest.mark.parametrize("max_ms", [28, pytest.param(14, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_12_eight_milliseconds_become_sixty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_ms: float) -> None:
    """A model of 8 ms that is given an image and gives one, 602 KB each, takes some 8 ms: over HTTP, over a socket of
    this machine alone, which a client reaches by its path, and over gRPC. It is given the request's own bytes. However
    busy the machine is, some rounds are nearly as quick; were the server slow, none would be.
    """
    roots, of_model_ms = list[object](), 8
    compute = _Identity.compute

    def looked_at(self: _Identity, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        roots.append(root(inputs["INPUT0"]))
        return compute(self, inputs)

    monkeypatch.setattr(_Identity, "compute", looked_at)
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{of_model_ms}" }} }}'
    models = write_models(tmp_path / "models", {"m": identity("FP32", "3, 224, 224", "max_batch_size: 8 " + delay)})
    image = np.random.default_rng(12).standard_normal((1, 3, 224, 224)).astype(np.float32)
    raw, path = image.tobytes(), tmp_path / "socket"
    told = {"name": "INPUT0", "datatype": "FP32", "shape": image.shape}
    body, headers = binary(
        [{**told, "parameters": {"binary_data_size": len(raw)}}], raw, parameters={"binary_data_output": True}
    )

    def quickest_ms(ask: Callable[[], bytes]) -> float:
        took_ms = [1e3]
        while len(took_ms) < 200 and min(took_ms) >= max_ms:
            began_s = time.perf_counter()
            found = ask()
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            assert found == raw
        return min(took_ms)

    with (
        in_process(models, grpc_port=0) as served, in_process(models, ServerSettings(uds=str(path))),
        closing(HTTPConnection(served.url.removeprefix("http://"))) as network,
        closing(Unix(path)) as here, connected(served.grpc_url) as grpc_client,
    ):  # fmt: skip

        def over(client: HTTPConnection) -> bytes:
            client.request("POST", "/v2/models/m/infer", body, headers)
            reply = client.getresponse()
            assert reply.status == 200
            return reply.read()[int(reply.headers[HEADER]) :]

        ways: dict[str, Callable[[], bytes]] = {
            "HTTP": partial(over, network), "the socket": partial(over, here),
            "gRPC": lambda: bytes(grpc_client.infer("m", [told], [raw]).raw_output_contents[0]),
        }  # fmt: skip
        found_ms = {name: quickest_ms(ask) for name, ask in ways.items()}
    assert all(of_model_ms <= ms < max_ms for ms in found_ms.values()), found_ms
    assert len(roots) >= len(ways) and {type(held) for held in roots} == {bytes}, "copies"


def root(array: Any) -> object:
    """What holds its numbers, in the end."""
    held = array
    while isinstance(held, np.ndarray | memoryview):
        below = held.base if isinstance(held, np.ndarray) else held.obj
        if below is None:
            break
        held = below
    return held


@pytest.mark.parametrize("n_most", [50, pytest.param(1, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_12_where_the_time_of_a_pipeline_went(tmp_path: Path, n_most: int) -> None:
    """By a header of its answer, for whoever asks with one: each hop, and what is between them is small."""
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "40" } }'
    steps = [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("b", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
    b = identity("INT32", "4", "max_batch_size: 8")
    models = {"a": b + slow, "b": b, "both": ensemble(["x"], ["z"], steps)}
    body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    with serving(write_models(tmp_path, models)) as url:
        infer(url, "both", body)
        assert "server-timing" not in infer(url, "both", body).headers, "of whoever asks"
        for _ in range(n_most):  # on a busy machine some answer has waited for nobody
            began_s = time.perf_counter()
            reply = infer(url, "both", body, {"x-millrace-timing": "1"})
            whole_ms = (time.perf_counter() - began_s) * 1e3
            parts_ = re.findall(r'([a-z_]+)(?:;desc="([a-z]+)")?;dur=([0-9.]+)', reply.headers["server-timing"])
            told = {(name, model): float(ms) for name, model, ms in parts_}
            hops = {("compute_infer", "a"), ("compute_infer", "b"), ("queue", "b")}
            assert {("read", ""), *hops, ("total", "")} <= told.keys()
            assert told["compute_infer", "a"] >= 40
            hops_ms = sum(ms for (_, model), ms in told.items() if model in ("a", "b"))
            assert hops_ms <= told["compute_infer", "both"] + 0.01 <= told["total", ""] + 0.02 <= whole_ms + 0.03
            server_ms, second_ms = told["total", ""] - hops_ms, told["compute_infer", "b"]
            if server_ms < 20 and second_ms < 40:
                break
    assert server_ms < 20 and second_ms < 40, "what the server itself takes, and the model that does nothing"


def test_13_one_model_holds_up_the_others(tmp_path: Path) -> None:
    """While one that takes half a second has more than it can do, requests to another are answered all the time."""
    slow = identity("FP32", "1", 'parameters { key: "execute_delay_ms" value { string_value: "500" } }')
    with serving(write_models(tmp_path, {"slow": slow, "quick": ADD_SUB})) as url, ThreadPoolExecutor(8) as threads:
        one = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]}
        busy = [threads.submit(httpx.post, f"{url}/v2/models/slow/infer", json={"inputs": [one]}) for _ in range(2)]
        inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [i] * 16} for i in (0, 1)]
        n_answered = 0
        with httpx.Client() as client:
            while not busy[1].done():
                assert client.post(f"{url}/v2/models/quick/infer", json={"inputs": inputs}).status_code == 200
                n_answered += 1
        assert n_answered > 50, "while the slow one was asked"
        assert [one.result().status_code for one in busy] == [200, 200]


def test_13_more_than_one_server_behind_one_port(tmp_path: Path) -> None:
    """With --reuse-port the kernel shares connections out among servers, here two of one process; HTTP and gRPC."""
    root = write_models(tmp_path, {"m": ADD_SUB})
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, grpc_port = free.getsockname()[1], other.getsockname()[1]
    shared = ServerSettings(port=port, reuse_port=True, metrics_port=0)
    inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [i] * 16} for i in (0, 1)]
    asked = request("m", [grpc_one("INT32", [1, 16], f"INPUT{i}") for i in (0, 1)], [bytes(64)] * 2)
    own = [("grpc.use_local_subchannel_pool", 1)]  # otherwise channels share a connection
    with in_process(root, shared, grpc_port=grpc_port) as one, in_process(root, shared, grpc_port=grpc_port) as two:

        def counts() -> list[float]:
            return [s.value for server in (one, two) for s in series(server.metrics_url.removesuffix("/metrics"))
                    if s.name == "nv_inference_count"]  # fmt: skip

        for _ in range(60):
            assert infer(one.url, "m", {"inputs": inputs}).status_code == 200  # a connection each
        over_http = counts()
        assert sum(over_http) == 60 and min(over_http) > 10, over_http
        for _ in range(60):
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", own) as channel:
                call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                call(asked.SerializeToString(), timeout=20)
        over_grpc = [after - before for after, before in zip(counts(), over_http, strict=True)]
        assert sum(over_grpc) == 60 and min(over_grpc) > 10, over_grpc
    with in_process(root, ServerSettings(port=port)), pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", port)


def test_14_the_openai_front_end_does_not_batch(tiny: Live) -> None:
    """Eight streams share the steps of one engine: far fewer than they have tokens."""
    before, n_tokens, n_clients = tiny.stats(), 24, 8

    def stream(_: int) -> int:
        with tiny.client() as client:
            asked: dict[str, Any] = {"prompt": "Once", "max_tokens": n_tokens, "extra_body": {"ignore_eos": True}}
            return sum(1 for _ in client.completions.create(model="served", stream=True, **asked))

    with ThreadPoolExecutor(n_clients) as threads:
        assert all(n > 2 for n in threads.map(stream, range(n_clients)))
    after = tiny.stats()
    assert after.steps_total - before.steps_total < n_clients * n_tokens / 2


def test_17_a_language_model_takes_seven_steps(tmp_path: Path, tiny: Live) -> None:
    """One line of configuration beside a checkpoint's folder; or `millrace serve FOLDER`, whose template is its own."""
    shutil.copytree(BUNDLED / "tiny", tmp_path / "llm" / "1")
    (tmp_path / "llm" / "config.pbtxt").write_text('backend: "millrace"')
    with in_process(tmp_path) as served:
        asked: dict[str, Any] = {"text_input": "Once upon a time", "max_tokens": 8, "temperature": 0.0}
        told = httpx.post(f"{served.url}/v2/models/llm/generate", json=asked, timeout=60).json()
    with LLM(BUNDLED / "tiny") as llm:
        (exact,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0))
    assert told["text_output"] == exact.outputs[0].text != ""
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8, "temperature": 0.0}
    assert tiny.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
