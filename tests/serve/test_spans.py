"""Spans of OpenTelemetry, as a collector gets them over OTLP; beside OpenTelemetry's own reader of headers."""

import json
import logging
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository.tracing.otel_spans import FLUSH_S, SpanExporter
from millrace.model_repository.tracing.trace_context import parse_parent
from millrace.model_repository.tracing.trace_flags import OtlpSettings
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, running
from tests.support.collector import Collected, attributes, collector
from tests.support.ensembles import ensemble
from tests.support.kserve import infer
from tests.support.kserve_grpc import connected, one, request
from tests.support.python_models import ANY, HEAD, OWN, SAY, write
from tests.support.repository import REPEAT, identity, in_process, write_models

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's SDK is not installed")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OURS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1,other=x"}
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
ASKS = f"""{HEAD}
    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.asked(request).output_tensors()) for request in requests]

    def asked(self, request):
        return pb_utils.InferenceRequest(
            model_name="a", requested_output_names=["OUTPUT0"], inputs=request.inputs()).exec()
"""
TELLS = HEAD + """
    def execute(self, requests):
        return [said(r.trace().get_context() or "none") for r in requests]
""" + SAY  # fmt: skip
PLAIN = identity("INT32", "4", "max_batch_size: 8")
NUMBERS = {"datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}


def settings(to: Collected, *more: str, rate: int = 1) -> ServerSettings:
    said = ("mode=opentelemetry", f"opentelemetry,url={to.url}", "level=TIMESTAMPS", f"rate={rate}",
            "opentelemetry,bsp_schedule_delay=20", *more)  # fmt: skip
    return ServerSettings(port=0, trace_config=said)


def ids(span: Any) -> tuple[str, str, str]:
    return span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()


def below(found: Collected, span: Any) -> list[str]:
    """Names of its children, in their order."""
    children = [s for s, _ in found.spans if s.parent_span_id == span.span_id]
    return [s.name for s in sorted(children, key=lambda s: s.start_time_unix_nano)]


def test_a_request_its_model_and_its_phases(tmp_path: Path) -> None:
    """Over HTTP, in the trace of its client; times are those of the clock, and lie within one another."""
    began_ns = time.time_ns()
    slow = PLAIN.replace('"identity"', '"identity" parameters { key: "execute_delay_ms" value { string_value: "20" } }')
    with collector() as found:
        said = settings(found, "opentelemetry,resource=service.name=mill", "opentelemetry,resource=zone=b", rate=0)
        with in_process(write_models(tmp_path, {"m": slow}), said) as served:
            body = {"id": "mine", "inputs": [{"name": "INPUT0", **NUMBERS}]}
            assert infer(served.url, "m", body, OURS).status_code == 200
            assert infer(served.url, "m", body).status_code == 200, "rate=0: only what is traced already"
            root, model, *phases = found.named("InferRequest", "m", *PHASES)
    ended_ns = time.time_ns()
    assert len(found.spans) == 6
    assert ids(root)[0] == TRACE and ids(root)[2] == SPAN and root.kind == root.SPAN_KIND_SERVER
    assert root.trace_state == "vendor=1,other=x"
    assert ids(model)[2] == ids(root)[1] and below(found, model) == list(PHASES)
    times = [(s.start_time_unix_nano, s.end_time_unix_nano) for s in (root, model, *phases)]
    assert all(began_ns < begin <= end < ended_ns for begin, end in times)
    assert all(times[0][0] <= begin and end <= times[0][1] for begin, end in times[1:])
    assert times[4][1] - times[4][0] >= 20e6, "it computes 20 ms"
    told = {"triton.model_name": "m", "triton.model_version": 1, "triton.request_id": "mine", "triton.trace_id": 1,
            "millrace.batch_size": 1, "millrace.batch_closed": "single"}  # fmt: skip
    assert attributes(model) == told and attributes(root) == {**told, "network.protocol.name": "http"}
    assert [e.name for e in root.events] == ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    (resource,) = {tuple(sorted(r.items())) for _, r in found.spans}
    assert {"service.name": "mill", "zone": "b", "telemetry.sdk.name": "opentelemetry"}.items() <= dict(
        resource
    ).items()


def test_a_client_that_names_two_parents_names_none(tmp_path: Path) -> None:
    """W3C's section 3.2: it comes once. States may come in several headers, which are one, in their order.

    Of two parents gRPC's library itself gives the last alone.
    """
    other = f"00-{TRACE}-{'1' * 16}-01"
    body = {"inputs": [{"name": "INPUT0", **NUMBERS}]}
    said: Any = {"model_name": "m", "inputs": [one("INT32", [1, 4])], "raw_input_contents": [bytes(16)]}
    with collector() as found:
        with (
            in_process(write_models(tmp_path, {"m": PLAIN}), settings(found), grpc_port=0) as served,
            connected(served.grpc_url) as client,
        ):
            for second in (other, OURS["traceparent"]):
                twice = [("traceparent", OURS["traceparent"]), ("traceparent", second)]
                assert httpx.post(f"{served.url}/v2/models/m/infer", json=body, headers=twice).status_code == 200
            states = [("tracestate", "a=1"), ("traceparent", other), ("tracestate", "b=2")]
            assert httpx.post(f"{served.url}/v2/models/m/infer", json=body, headers=states).status_code == 200
            client.call("ModelInfer", states, **said)
        roots = [span for span, _ in found.spans if span.name == "InferRequest"]
    parents = [(span.parent_span_id.hex(), span.trace_state) for span in roots]
    assert parents == [("", "")] * 2 + [("1" * 16, "a=1,b=2")] * 2


def test_steps_and_models_that_models_ask_are_below_whoever_asks(tmp_path: Path) -> None:
    steps = [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("asks", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
    root = write_models(tmp_path, {"a": PLAIN, "both": ensemble(["x"], ["z"], steps)})
    write(root, "asks", ASKS, PLAIN.replace('"identity"', '"python"'))
    with collector() as found:
        with in_process(root, settings(found), grpc_port=0) as served, connected(served.grpc_url) as client:
            metadata = tuple(OURS.items())
            client.call("ModelInfer", metadata, model_name="both", inputs=[one("INT32", [1, 4], "x")],
                        raw_input_contents=[bytes(16)])  # fmt: skip
        whole, both, asks = found.named("InferRequest", "both", "asks")
    assert ids(whole)[0] == TRACE and ids(whole)[2] == SPAN and attributes(whole)["network.protocol.name"] == "grpc"
    assert below(found, both) == ["a", "asks"], "an ensemble has no queue of its own"
    assert [name for name in below(found, asks) if name not in PHASES] == ["a"]
    assert {ids(span)[0] for span, _ in found.spans} == {TRACE}


def test_a_stream_is_traced_to_its_end(tmp_path: Path) -> None:
    with collector() as found:
        root = write_models(tmp_path, {"repeat": REPEAT})
        with in_process(root, settings(found), grpc_port=0) as served, connected(served.grpc_url) as client:
            inputs = [one("INT32", [2], "IN"), one("UINT32", [2], "DELAY"), one("UINT32", [1], "WAIT")]
            asked = request("repeat", inputs, [bytes(8), bytes(8), bytes(4)])
            assert len(list(client.stream(iter([asked]), tuple(OURS.items())))) == 2
            body = {"IN": [1], "DELAY": [0], "WAIT": 0}
            httpx.post(f"{served.url}/v2/models/repeat/generate_stream", json=body, headers=OURS)
        assert [s.parent_span_id.hex() for s, _ in found.spans if s.name == "InferRequest"] == [SPAN] * 2


@pytest.mark.parametrize("process", ["", OWN], ids=["in process", "child"])
def test_a_model_hands_its_trace_on(tmp_path: Path, process: str) -> None:
    write(tmp_path, "m", TELLS, ANY % process)
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    with collector() as found:
        with in_process(tmp_path, settings(found, rate=0)) as served:
            (told,) = infer(served.url, "m", body, OURS).json()["outputs"][0]["data"]
            (untold,) = infer(served.url, "m", body).json()["outputs"][0]["data"]
        (model,) = found.named("m")
    assert json.loads(told) == {"traceparent": f"00-{TRACE}-{ids(model)[1]}-01", "tracestate": OURS["tracestate"]}
    assert untold == "none"


def test_errors_and_what_the_client_does_not_record(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + "    def execute(self, requests):\n        raise ValueError('no')\n", ANY % "")
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    with collector() as found:
        with in_process(tmp_path, settings(found)) as served:
            assert infer(served.url, "m", body, {"traceparent": f"00-{TRACE}-{SPAN}-00"}).status_code == 500
            assert infer(served.url, "m", body).status_code == 500
        root, model = found.named("InferRequest", "m")
    assert ids(root)[0] != TRACE and ids(root)[2] == "", "the first is its client's not to be recorded"
    for span in (root, model):
        assert span.status.code == span.status.STATUS_CODE_ERROR and "ValueError: no" in span.status.message
        assert attributes(span)["error.type"] == "INTERNAL"


def test_settings_are_changed_while_it_runs(tmp_path: Path) -> None:
    body = {"inputs": [{"name": "INPUT0", **NUMBERS}]}
    with collector() as found, in_process(write_models(tmp_path, {"m": PLAIN}), settings(found)) as served:

        def change(**said: Any) -> httpx.Response:
            return httpx.post(f"{served.url}/v2/trace/setting", json=said)

        told = change(trace_rate="0").json()
        assert (told["trace_mode"], told["trace_rate"], told["url"]) == ("opentelemetry", "0", found.url)
        assert "trace_file" not in told and change(trace_level=["TENSORS"]).status_code == 400
        assert infer(served.url, "m", body).status_code == 200
        change(trace_rate=None, trace_count="1")
        assert [infer(served.url, "m", body).status_code for _ in range(3)] == [200] * 3
        change(trace_level=["OFF"])
        assert infer(served.url, "m", body, OURS).status_code == 200
    assert [span.name for span, _ in found.spans].count("InferRequest") == 1


def test_language_models(tmp_path: Path) -> None:
    with collector() as found:
        with running(Fake(), settings(found)) as server:
            asked: dict[str, Any] = {"prompt": "Once", "max_tokens": 5, "stream": True, "model": "fake"}
            headers = {**OURS, "x-request-id": "one"}
            assert httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers).status_code == 200
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 400
            assert httpx.get(f"{server.url}/v1/models").status_code == 200, "which asks no model"
        text, failed = found.named("text_completion fake", "chat fake")
    assert len(found.spans) == 2 and ids(text)[0] == TRACE and ids(text)[2] == SPAN
    told = attributes(text)
    assert 0 <= told.pop("gen_ai.latency.time_in_queue") <= told.pop("gen_ai.latency.time_to_first_token") < 10
    n_prompt = told.pop("gen_ai.usage.input_tokens")
    assert n_prompt > 0 and told == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "millrace", "gen_ai.request.model": "fake",
        "gen_ai.request.id": "one", "gen_ai.usage.output_tokens": 5, "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": 200,
    }  # fmt: skip
    assert attributes(failed)["error.type"] == "400" and failed.status.code == failed.status.STATUS_CODE_ERROR
    assert text.end_time_unix_nano > text.start_time_unix_nano


def flood(spans: SpanExporter, n: int) -> float:
    """Seconds that n spans take whoever tells them."""
    began_s = time.monotonic()
    for _ in range(n):
        spans.record_span("m", time.monotonic_ns(), None, {"a": 1})
    return time.monotonic() - began_s


@pytest.mark.parametrize("max_s", [4, pytest.param(1.5, marks=pytest.mark.timing)], ids=["busy", "idle"])
@pytest.mark.parametrize("how", ["gone", "hangs", "refuses"])
def test_a_collector_that_takes_nothing_holds_nobody_up(
    how: str, max_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # the exporter tells of each batch
    with collector(503 if how == "refuses" else 200, threading.Event() if how == "hangs" else None) as found:
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"
        spans = SpanExporter(OtlpSettings(url=nobody if how == "gone" else found.url, queue=64, batch=16, delay_ms=5))
        assert flood(spans, 5000) < 5
        (waiting,) = [p for p in spans._provider._active_span_processor._span_processors]
        assert len(waiting._batch_processor._queue) <= 64
        began_s = time.monotonic()
        spans.close(0.3)
        assert time.monotonic() - began_s < max_s and FLUSH_S < 5


def test_the_end_sends_what_is_there() -> None:
    with collector() as found:
        spans = SpanExporter(OtlpSettings(url=found.url, delay_ms=60_000, batch=16))
        flood(spans, 40)
        spans.close()
        assert len(found.spans) == 40 and found.n_batches == 3
        spans.record_span("late", 1, None, {})
        spans.close()
    assert len(found.spans) == 40


def test_what_clients_write_is_kept_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Spans wait for the collector, so that their length is bounded as their number is."""
    with collector() as found, in_process(write_models(tmp_path, {"m": PLAIN}), settings(found)) as served:
        body = {"id": "i" * 100_000, "inputs": [{"name": "INPUT0", **NUMBERS}]}
        assert infer(served.url, "m", body, {**OURS, "tracestate": "junk"}).json()["id"] == body["id"]
        (root,) = found.named("InferRequest")
    assert attributes(root)["triton.request_id"] == "i" * 1000
    assert root.trace_state == "" and root.parent_span_id.hex() == SPAN
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")], "one a request would fill the log"


@pytest.mark.parametrize("seed", range(200))
def test_states_are_read_as_opentelemetry_reads_them(seed: int) -> None:
    from opentelemetry.trace import TraceState

    rng = random.Random(seed)
    text = rng.choice(["a=1", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "t@v=x y,b=", "0a=1", "a=1, ,b=2", "k/*-_=~"])
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["=", ",", " ", "A", "\xff", "@", "a", ",a=3"]) + text[at + rng.randint(0, 1) :]
    text = text.strip()
    theirs, ours = TraceState.from_header([text]), parse_parent(OURS["traceparent"], text)
    assert ours is not None and ours.state == (text if len(theirs) else ""), text


@pytest.mark.parametrize("seed", range(200))
def test_headers_are_read_as_opentelemetry_reads_them(seed: int) -> None:
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    rng = random.Random(seed)
    text = rng.choice(["00", "00", "01", "cc", "ff"]) + f"-{TRACE}-{SPAN}-" + rng.choice(["00", "01", "03", "ff"])
    text += rng.choice(["", "", "-", "-more"])
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["0", "A", "g", "-", "", " "]) + text[at + rng.randint(0, 1) :]
    read = TraceContextTextMapPropagator().extract({"traceparent": text})
    theirs, ours = get_current_span(read).get_span_context(), parse_parent(text, None)
    assert theirs.is_valid == (ours is not None), text
    if ours is not None:
        assert (ours.trace_id, ours.span_id) == (theirs.trace_id, theirs.span_id)
        assert ours.is_sampled == theirs.trace_flags.sampled
