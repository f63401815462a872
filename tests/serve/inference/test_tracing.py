"""Traces: which requests have one, what it says, and the files that hold them."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.serve.inference import trace_files, trace_flags, tracing
from millrace.serve.inference.cache import ResponseCache
from millrace.serve.inference.common import Common
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.spans import Open
from millrace.serve.inference.status import StatusError
from millrace.serve.inference.trace_context import Parent, parent_of
from millrace.serve.inference.trace_flags import Exporting, TraceFlags
from millrace.serve.inference.tracing import Exchange, Tracer
from tests.support.ensembles import asking, ensemble
from tests.support.loaded import BATCHES, Loaded, asked
from tests.support.python_models import HEAD, write
from tests.support.repository import identity, write_models

TIMES = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
         "INFER_RESPONSE_COMPLETE", "REQUEST_END"]  # fmt: skip

ASKS = f"""{HEAD}
    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.asked(request).output_tensors()) for request in requests]

    def asked(self, request):
        return pb_utils.InferenceRequest(
            model_name="a", requested_output_names=["OUTPUT0"], inputs=request.inputs()).exec()
"""


def tracer(path: Path, **said: Any) -> Tracer:
    level = {"trace_level": ("TIMESTAMPS",), "trace_rate": 1}
    return Tracer({"trace_file": str(path), **level, **said})


def traces(path: Path) -> dict[int, dict[str, Any]]:
    """By their numbers; the records of each in one, as Triton's own tool reads them."""
    found: dict[int, dict[str, Any]] = {}
    for record in json.loads(path.read_text()):
        one = found.setdefault(record["id"], {"tensors": []})
        one |= {key: value for key, value in record.items() if key != "tensor"}
        if "tensor" in record:
            one["tensors"].append((record["activity"], record["tensor"]))
    return found


def names(trace: dict[str, Any]) -> list[str]:
    return [one["name"] for one in trace["timestamps"]]


def test_each_request_tells_its_times_and_its_batch(tmp_path: Path) -> None:
    more = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 200000 }"
    delayed = BATCHES % more + 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
    root, file = write_models(tmp_path / "models", {"m": delayed}), tmp_path / "trace.json"

    async def run() -> None:
        async with Loaded(root, Common(tracer=tracer(file))) as repository:
            model = repository.get("m")
            requests = [asked(model, 1), asked(model, 2, 3), asked(model, 4)]
            requests[1].id = "mine"
            await asyncio.gather(*map(model.infer, requests))
            await model.infer(asked(model, 5))

    asyncio.run(run())
    found = traces(file)
    assert list(found) == [1, 2, 3, 4] and [t.get("request_id") for t in found.values()] == [None, "mine", None, None]
    told = [(t["model_name"], t["model_version"], t["batch_size"], t["batch_closed"]) for t in found.values()]
    assert told == [("m", 1, 4, "preferred")] * 3 + [("m", 1, 1, "delay")]
    for trace in found.values():
        assert names(trace) == TIMES
        ns = [one["ns"] for one in trace["timestamps"]]
        assert ns == sorted(ns) and ns[4] - ns[3] >= 5e6, "it computes 5 ms"
    assert found[4]["timestamps"][2]["ns"] - found[4]["timestamps"][1]["ns"] >= 0.2e9, "it waited for others"


def test_what_is_computed_at_once_kept_or_refused_is_traced(tmp_path: Path) -> None:
    config = identity("FP32", "1", "max_batch_size: 8 response_cache { enable: true }")
    root, file = write_models(tmp_path / "models", {"m": config, "n": BATCHES % ""}), tmp_path / "trace.json"
    common = Common(tracer=tracer(file), cache=ResponseCache(1 << 20))

    async def run() -> None:
        async with Loaded(root, common, max_model_requests=1) as repository:
            for name in ("n", "m", "m"):
                await repository.get(name).infer(asked(repository.get(name), 1))
            model = repository.get("n")
            model._n_open = 1  # as though another request was there
            with pytest.raises(StatusError, match="maximum queue size"):
                await model.infer(asked(model, 1))
            model._n_open = 0

    asyncio.run(run())
    computed, missed, kept, refused = traces(file).values()
    assert names(computed) == names(missed) == TIMES and missed["batch_closed"] == "single"
    assert names(kept) == ["REQUEST_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"] and "batch_size" not in kept
    assert names(refused) == ["REQUEST_START", "REQUEST_END"] and "maximum queue size" in refused["error"]


def test_steps_and_models_that_models_ask_are_parts_of_a_trace(tmp_path: Path) -> None:
    steps = [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("b", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
    plain = identity("INT32", "4", "max_batch_size: 8")
    root = write_models(tmp_path / "models", {"a": plain, "b": plain, "both": ensemble(["x"], ["z"], steps)})
    write(root, "asks", ASKS, plain.replace('"identity"', '"python"'))
    file = tmp_path / "trace.json"

    async def run() -> None:
        async with Loaded(root, Common(tracer=tracer(file))) as repository:
            for name, tensor in (("both", "x"), ("asks", "INPUT0")):
                outer = repository.get(name)
                await outer.infer(asking(outer, (), **{tensor: np.zeros((1, 4), np.int32)}))

    asyncio.run(run())
    found = traces(file)
    (both,) = (number for number, t in found.items() if t["model_name"] == "both")
    (asks,) = (number for number, t in found.items() if t["model_name"] == "asks")
    assert {t["parent_id"] for t in found.values() if t["model_name"] == "b"} == {both}
    parents = sorted((t["model_name"], t.get("parent_id", 0)) for t in found.values())
    assert parents == sorted([("both", 0), ("a", both), ("b", both), ("asks", 0), ("a", asks)])


def test_a_part_has_no_trace_without_the_whole(tmp_path: Path) -> None:
    plain, file = identity("INT32", "4", "max_batch_size: 8"), tmp_path / "trace.json"
    both = ensemble(["x"], ["y"], [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"})])
    root = write_models(tmp_path / "models", {"a": plain, "both": both})

    async def run() -> None:
        async with Loaded(root, Common(tracer=tracer(file, trace_rate=2))) as repository:
            for _ in range(4):
                outer = repository.get("both")
                await outer.infer(asking(outer, x=np.zeros((1, 4), np.int32)))

    asyncio.run(run())
    told = sorted((t["model_name"], "parent_id" in t) for t in traces(file).values())
    assert told == [("a", True), ("a", True), ("both", False), ("both", False)]


def test_tensors_are_told(tmp_path: Path) -> None:
    config = identity("STRING", "-1", "max_batch_size: 8")
    root, file = write_models(tmp_path / "models", {"m": config}), tmp_path / "trace.json"

    async def run() -> None:
        async with Loaded(root, Common(tracer=tracer(file, trace_level=("TENSORS",)))) as repository:
            model = repository.get("m")
            await model.infer(asking(model, INPUT0=np.array([[b"a", b"\xff"]], np.object_)))

    asyncio.run(run())
    (trace,) = traces(file).values()
    told = {"data": "a,\ufffd", "shape": "1,2", "dtype": "BYTES"}
    assert trace["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "INPUT0", **told}), ("TENSOR_BACKEND_OUTPUT", {"name": "OUTPUT0", **told})
    ]  # fmt: skip
    assert "timestamps" not in trace


def come(tracer: Tracer, model: str, n: int) -> list[int]:
    """Of n requests those that are traced, by their places."""
    found = []
    for i in range(n):
        request = InferRequest({})
        request.received_ns = 1
        tracer.begin(request, model)
        if request.trace is not None:
            found.append(i)
            tracer.end(request, model, 1, 2, None)
    return found


def test_every_nth_is_traced_and_so_many(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t", trace_rate=3, trace_count=2)
    assert come(one, "m", 12) == [2, 5] and one.told()["trace_count"] == "0"
    one.change({"trace_count": 1, "trace_rate": 1})
    assert come(one, "m", 5) == [0]
    assert come(tracer(tmp_path / "t", trace_level=("OFF",)), "m", 5) == []


def test_a_models_settings_stand_before_the_servers(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t")
    first = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0",
             "trace_file": str(tmp_path / "t"), "trace_mode": "triton"}  # fmt: skip
    assert one.told() == one.told("m") == first
    one.change({"trace_rate": 12, "log_frequency": 34}, "m")
    one.change({"trace_rate": 56, "trace_count": 78, "trace_level": ("OFF",)})
    assert one.told() == {**first, "trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]}
    assert one.told("m") == {**first, "trace_level": ["OFF"], "trace_rate": "12", "trace_count": "78",
                             "log_frequency": "34"}  # fmt: skip
    assert not one.is_on
    one.change({"trace_rate": None, "trace_count": None})
    assert one.told() == {**first, "trace_level": ["OFF"]}
    one.change({"trace_rate": None, "trace_level": None}, "m")
    assert one.told("m") == {**first, "trace_level": ["OFF"], "log_frequency": "34"}
    one.change({"trace_level": None})
    assert one.is_on and one.told("m") == {**first, "log_frequency": "34"}
    one.change({"trace_count": 3}, "m")
    assert come(one, "m", 2) == [0, 1] and one.told("m")["trace_count"] == "1"
    one.change({"trace_rate": 1})
    assert one.told("m")["trace_count"] == "1", "what was taken stays taken"
    one.change({"trace_count": None, "log_frequency": None}, "m")
    assert one.told("m") == first
    with pytest.raises(StatusError, match="trace file name is not given"):
        Tracer().change({"trace_level": ("TIMESTAMPS",)})


@pytest.mark.parametrize("seed", range(3))
def test_files_are_json_whenever_they_are_read(tmp_path: Path, seed: int) -> None:
    rng, files, n = random.Random(seed), trace_files.TraceFiles(), 0
    for _ in range(400):
        files.add(str(tmp_path / "t"), 0, [b'{"id":%d}' % n] * rng.randint(1, 3))
        n += 1
        if rng.random() < 0.02:
            files.write()
            assert {one["id"] for one in json.loads((tmp_path / "t").read_text())} == set(range(n))
    files.write()
    assert {one["id"] for one in json.loads((tmp_path / "t").read_text())} == set(range(n))


def test_a_few_traces_are_written_soon(tmp_path: Path) -> None:
    due: list[tuple[float, Callable[[], None]]] = []
    one = trace_files.TraceFiles(lambda seconds, call: due.append((seconds, call)))
    one.add(str(tmp_path / "t"), 0, [b'{"id":1}'])
    one.add(str(tmp_path / "t"), 0, [b'{"id":2}'])
    assert [seconds for seconds, _ in due] == [trace_files.FLUSH_S] and not (tmp_path / "t").exists()
    due.pop()[1]()
    assert json.loads((tmp_path / "t").read_text()) == [{"id": 1}, {"id": 2}]
    one.add(str(tmp_path / "t"), 0, [b'{"id":3}'])
    one.write()
    due.pop()[1]()
    assert json.loads((tmp_path / "t").read_text())[2:] == [{"id": 3}], "nothing is written twice"
    one.add(str(tmp_path / "t"), 3, [b'{"id":4}'])
    assert not due, "a file of its own is written when it is whole"
    one.write()
    assert json.loads((tmp_path / "t.0").read_text()) == [{"id": 4}], "or at the end, as one of them"


def test_a_number_of_traces_is_a_file(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t", log_frequency=2)
    come(one, "m", 5)
    one.close()
    assert [list(traces(tmp_path / f"t.{i}")) for i in range(3)] == [[1, 2], [3, 4], [5]]
    assert len(list(tmp_path.iterdir())) == 3


def test_files_end_at_a_size_or_where_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MOST_BYTES", 10_000)
    one = tracer(tmp_path / "t")
    come(one, "m", 1000)
    one.close()
    assert 10_000 < (tmp_path / "t").stat().st_size < 30_000 and len(traces(tmp_path / "t")) < 1000
    nowhere = tracer(tmp_path / "none" / "t")
    assert len(come(nowhere, "m", 200)) == 200, "inferences go on"
    nowhere.close()


def test_flags_are_tritons() -> None:
    said = ("triton,file=/tmp/t.json", "level=TIMESTAMPS", "level=TENSORS", "rate=7", "count=9",
            "triton,log-frequency=5", "mode=triton")  # fmt: skip
    assert Tracer.of(said).told() == {
        "trace_file": "/tmp/t.json", "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "7", "trace_count": "9",
        "log_frequency": "5", "trace_mode": "triton",
    }  # fmt: skip
    assert not Tracer.of(()).is_on


@pytest.mark.parametrize(
    "said, fragment",
    [
        (("zipkin,url=x",), "another mode"),
        (("mode=zipkin",), "another mode"),
        (("opentelemetry,url=http://c:4318",), "is of mode opentelemetry, and the mode is triton"),
        (("url=http://c:4318",), "is of mode opentelemetry, and the mode is triton"),
        (("mode=opentelemetry", "file=t.json"), "is of mode triton, and the mode is opentelemetry"),
        (("mode=opentelemetry", "triton,rate=7"), "is of mode triton, and the mode is opentelemetry"),
        (("mode=opentelemetry", "url=c:4318"), "expected: http://HOST:PORT/v1/traces"),
        (("mode=opentelemetry", "resource=name"), "expected: KEY=VALUE"),
        (("mode=opentelemetry", "level=TENSORS"), "spans hold no tensors"),
        (("mode=opentelemetry", "bsp_max_queue_size=0"), "out of range"),
        (("mode=opentelemetry", "bsp_max_queue_size=8"), "bsp_max_export_batch_size=512"),
        (("level=TIMESTAMPS",), "names no file"),
        (("file=x", "level=ALL"), "Unsupported trace level: ALL\n  expected: OFF, TIMESTAMPS, TENSORS"),
        (("rate=0",), "out of range"),
        (("rate=many",), "Unable to parse(?s:.)*expected: a whole number from 1 to 4294967295"),
        (("mode=opentelemetry", "url=x"), "'url=x': url is 'x'(?s:.)*expected: http://HOST:PORT"),
        (("speed=1",), "KEY=VALUE"),
        (("file=/nowhere/t.json", "level=TIMESTAMPS"), "a folder that exists"),
    ],
)
def test_a_mistake_in_a_flag_is_said(said: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        Tracer.of(said)


# ---------------------------------------------------------------------- mode opentelemetry, without its packages

SPAN = f"00-{0xA:032x}-{0xB:016x}-01"


class Told:
    """In the place of `Spans`: what begins and what ends."""

    def __init__(self, to: Exporting | None = None) -> None:
        self.to, self.began, self.ended = to or Exporting(), list[Any](), list[Any]()

    def begin(self, model: str, began_ns: int, parent: Parent | None) -> Open:
        self.began.append((model, began_ns, parent))
        return Open(None, _Span(model), 0, "")

    def begin_part(self, model: str, outer: Open) -> Open:
        self.began.append((model, outer.of_model.model, None))
        return Open(None, _Span(model), 0, "")

    def end(self, spans: Open, request: InferRequest, done_ns: int, error: Any, told: Any, *around: Any) -> None:
        self.ended.append((spans.of_model.model, told, around))


class _Span:
    trace_id, span_id = 0xA, 0xB

    def __init__(self, model: str) -> None:
        self.model = model

    def get_span_context(self) -> "_Span":
        return self


def spanned(**said: Any) -> tuple[Tracer, Told]:
    told = Told()
    level = {"trace_mode": "opentelemetry", "trace_level": ("TIMESTAMPS",), "trace_rate": 1}
    return Tracer({**level, **said}, told), told  # type: ignore[arg-type]


def test_a_clients_trace_decides_and_otherwise_the_rate() -> None:
    """Of every request with a span above it, whether that is recorded; rate and count are of the others."""
    one, told = spanned(trace_rate=3, trace_count=1)
    for header in (SPAN, SPAN.replace("-01", "-00"), None, None, SPAN, None, None, None, None):
        request = InferRequest({})
        one.came(request, "HTTP", 5, one.parent(header, None))
        one.begin(request, "m")
        if request.trace is not None:
            one.end(request, "m", 1, 9, None)
    parent = Parent(0xA, 0xB, True)
    assert told.began == [("m", 5, parent), ("m", 5, parent), ("m", 5, None)]
    assert [around[0] for _, _, around in told.ended] == ["http"] * 3
    off, told = spanned(trace_rate=0)
    assert off.is_on and come(off, "m", 3) == [], "only what is traced already"
    off.change({"trace_level": ("OFF",)})
    assert off.parent(SPAN, None) is None and not off.is_on


def test_a_client_that_leaves_ends_its_span_when_the_model_is_done() -> None:
    one, told = spanned()
    request = InferRequest({})
    with pytest.raises(asyncio.CancelledError), Exchange(one, request, "GRPC", 5):
        one.begin(request, "m")
        raise asyncio.CancelledError
    assert not told.ended
    one.end(request, "m", 1, 9, None)
    assert [t["triton.model_name"] for _, t, _ in told.ended] == ["m"] and request.trace is request.came is None


def test_parts_are_below_whoever_asks(tmp_path: Path) -> None:
    steps = [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("asks", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
    plain = identity("INT32", "4", "max_batch_size: 8")
    root = write_models(tmp_path, {"a": plain, "both": ensemble(["x"], ["z"], steps)})
    write(root, "asks", ASKS, plain.replace('"identity"', '"python"'))
    one, told = spanned()

    async def run() -> None:
        async with Loaded(root, Common(tracer=one)) as repository:
            outer = repository.get("both")
            await outer.infer(asking(outer, x=np.zeros((1, 4), np.int32)))

    asyncio.run(run())
    assert [(model, above) for model, above, _ in told.began[1:]] == [("a", "both"), ("asks", "both"), ("a", "asks")]
    assert sorted(model for model, _, _ in told.ended) == ["a", "a", "asks", "both"]
    assert all(t["millrace.batch_size"] == 1 for m, t, _ in told.ended if m != "both")


def test_settings_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "Spans", Told)
    monkeypatch.setattr(trace_flags, "check_extra", lambda: None)
    one = Tracer.of(("mode=opentelemetry", "opentelemetry,url=https://c/v1/traces", "level=TIMESTAMPS", "rate=0",
                     "opentelemetry,resource=service.name=mill", "resource=zone=b=c", "bsp_max_queue_size=99",
                     "opentelemetry,bsp_max_export_batch_size=9"))  # fmt: skip
    told = {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "0", "trace_count": "-1", "trace_mode": "opentelemetry",
        "url": "https://c/v1/traces", "resource": ["service.name=mill", "zone=b=c"], "bsp_max_queue_size": "99",
        "bsp_schedule_delay": "5000", "bsp_max_export_batch_size": "9",
    }  # fmt: skip
    assert one.told() == one.told("m") == told
    one.change({"trace_rate": 5}, "m")
    assert one.told("m") == {**told, "trace_rate": "5"}
    for change, says in (({"trace_level": ("TENSORS",)}, "TENSORS"), ({"log_frequency": 2}, "log_frequency")):
        with pytest.raises(StatusError, match=f"{says} is of trace mode triton"):
            one.change(change)


def test_without_the_extra_one_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        TraceFlags.of(("mode=opentelemetry",))
    assert "mode=opentelemetry without OpenTelemetry's SDK" in refused.value.what
    assert refused.value.expected == 'pip install "millrace[otel]"'


@pytest.mark.parametrize(
    "header, found",
    [
        (SPAN, Parent(0xA, 0xB, True)),
        (f"  {SPAN} ", Parent(0xA, 0xB, True)),
        (SPAN.encode(), Parent(0xA, 0xB, True)),
        (SPAN[:-2] + "fe", Parent(0xA, 0xB, False)),
        ("42" + SPAN[2:] + "-later", Parent(0xA, 0xB, True)),
        (SPAN + "-later", None),
        ("ff" + SPAN[2:], None),
        (SPAN.upper(), None),
        (SPAN.replace("a-", "0-", 1), None),
        (SPAN.replace("b-", "0-", 1), None),
        (SPAN[:-1], None),
        ("", None),
        (None, None),
    ],
)
def test_headers_of_a_trace(header: Any, found: Parent | None) -> None:
    assert parent_of(header, None) == found


def test_the_state_of_a_trace_is_kept_or_left_out_whole() -> None:
    assert parent_of(SPAN, b" a=1,b=2 ") == Parent(0xA, 0xB, True, "a=1,b=2")
    longest = "a=" + "x" * 253 + ",b=" + "x" * 254  # 512 characters, of which no value has more than 256
    assert parent_of(SPAN, longest) == Parent(0xA, 0xB, True, longest)
    assert parent_of(SPAN, longest + "x") == parent_of(SPAN, "a=" + "x" * 257) == Parent(0xA, 0xB, True)
