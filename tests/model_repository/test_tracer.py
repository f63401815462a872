"""Traces and spans: which requests have one, what it says, and what is below it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.response_cache import LocalResponseCache
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.tracing.trace_context import Parent, parse_parent
from millrace.model_repository.tracing.tracer import TracedExchange
from tests.support.ensembles import asking, ensemble
from tests.support.loaded import BATCHES, Loaded, asked
from tests.support.python_models import write
from tests.support.repository import identity, write_models
from tests.support.traces import ASKS, come, spanned, tracer, traces

TIMES = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
         "INFER_RESPONSE_COMPLETE", "REQUEST_END"]  # fmt: skip


def names(trace: dict[str, Any]) -> list[str]:
    return [one["name"] for one in trace["timestamps"]]


def test_each_request_tells_its_times_and_its_batch(tmp_path: Path) -> None:
    more = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 200000 }"
    delayed = BATCHES % more + 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
    root, file = write_models(tmp_path / "models", {"m": delayed}), tmp_path / "trace.json"

    async def run() -> None:
        async with Loaded(root, RepositoryContext(tracer=tracer(file))) as repository:
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
    common = RepositoryContext(tracer=tracer(file), cache=LocalResponseCache(1 << 20))

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
        async with Loaded(root, RepositoryContext(tracer=tracer(file))) as repository:
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
        async with Loaded(root, RepositoryContext(tracer=tracer(file, trace_rate=2))) as repository:
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
        async with Loaded(root, RepositoryContext(tracer=tracer(file, trace_level=("TENSORS",)))) as repository:
            model = repository.get("m")
            await model.infer(asking(model, INPUT0=np.array([[b"a", b"\xff"]], np.object_)))

    asyncio.run(run())
    (trace,) = traces(file).values()
    told = {"data": "a,\ufffd", "shape": "1,2", "dtype": "BYTES"}
    assert trace["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "INPUT0", **told}), ("TENSOR_BACKEND_OUTPUT", {"name": "OUTPUT0", **told})
    ]  # fmt: skip
    assert "timestamps" not in trace


def test_every_nth_is_traced_and_so_many(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t", trace_rate=3, trace_count=2)
    assert come(one, "m", 12) == [2, 5] and one.settings_dict()["trace_count"] == "0"
    one.change({"trace_count": 1, "trace_rate": 1})
    assert come(one, "m", 5) == [0]
    assert come(tracer(tmp_path / "t", trace_level=("OFF",)), "m", 5) == []


SPAN = f"00-{0xA:032x}-{0xB:016x}-01"


def test_a_clients_trace_decides_and_otherwise_the_rate() -> None:
    """Of every request with a span above it, whether that is recorded; rate and count are of the others."""
    one, told = spanned(trace_rate=3, trace_count=1)
    for header in (SPAN, SPAN.replace("-01", "-00"), None, None, SPAN, None, None, None, None):
        request = InferRequest({})
        one.trace_stream(request, "HTTP", 5, one.parent(header, None))
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
    with pytest.raises(asyncio.CancelledError), TracedExchange(one, request, "GRPC", 5):
        one.begin(request, "m")
        raise asyncio.CancelledError
    assert not told.ended
    one.end(request, "m", 1, 9, None)
    assert [t["triton.model_name"] for _, t, _ in told.ended] == ["m"] and request.trace is request.exchange is None


def test_parts_are_below_whoever_asks(tmp_path: Path) -> None:
    steps = [("a", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("asks", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
    plain = identity("INT32", "4", "max_batch_size: 8")
    root = write_models(tmp_path, {"a": plain, "both": ensemble(["x"], ["z"], steps)})
    write(root, "asks", ASKS, plain.replace('"identity"', '"python"'))
    one, told = spanned()

    async def run() -> None:
        async with Loaded(root, RepositoryContext(tracer=one)) as repository:
            outer = repository.get("both")
            await outer.infer(asking(outer, x=np.zeros((1, 4), np.int32)))

    asyncio.run(run())
    assert [(model, above) for model, above, _ in told.began[1:]] == [("a", "both"), ("asks", "both"), ("a", "asks")]
    assert sorted(model for model, _, _ in told.ended) == ["a", "a", "asks", "both"]
    assert all(t["millrace.batch_size"] == 1 for m, t, _ in told.ended if m != "both")


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
    assert parse_parent(header, None) == found


def test_the_state_of_a_trace_is_kept_or_left_out_whole() -> None:
    assert parse_parent(SPAN, b" a=1,b=2 ") == Parent(0xA, 0xB, True, "a=1,b=2")
    longest = "a=" + "x" * 253 + ",b=" + "x" * 254  # 512 characters, of which no value has more than 256
    assert parse_parent(SPAN, longest) == Parent(0xA, 0xB, True, longest)
    assert parse_parent(SPAN, longest + "x") == parse_parent(SPAN, "a=" + "x" * 257) == Parent(0xA, 0xB, True)
