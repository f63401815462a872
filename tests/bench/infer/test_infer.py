"""Inferences on the null server over HTTP and gRPC: every figure against what it did, and what goes wrong."""

import asyncio
import csv
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from millrace.bench.client.client_load import ClientHealth
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.infer.measure import InferResults, infer, infer_plan, transport
from millrace.bench.infer.results import infer_page, perf_analyzer_csv, report, write_results
from millrace.bench.infer.settings import LevelSettings, ModelSettings
from millrace.bench.infer.target import InferTarget
from millrace.bench.names import GRPC, HTTP
from millrace.bench.null_server.ledger import FAULTS, NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.errors import ConfigError, MachineError
from millrace.model_repository.request.tensors import DTYPES, InferTensor, objects
from tests.bench.conftest import Null

ALONE = pytest.mark.alone  # looks at the clock
WITHIN, WITHIN_BUSY = 0.02, 0.3  # on an idle machine; on one that computes other things, too, only the scale
BOTH = pytest.mark.parametrize("protocol", [HTTP, GRPC])
QUICK = NullTiming(ttft_ms="5", itl_ms="0.5")
# A batch of n takes 100 + 2.5 (n - 1) ms, on two instances; where it has to be quick, 60 + 1.5 (n - 1).
TIMED, TIMED_QUICK = (NullTiming(f"{ms}", f"{ms / 40}", instances=2) for ms in (100, 60))


def ran(work: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def url_of(server: NullProcess, protocol: str) -> str:
    return server.grpc_url if protocol == GRPC else server.url


def inferred(server: NullProcess, protocol: str = HTTP, certify_s: float = 0.0, **given: Any) -> InferResults:
    names = set(ModelSettings.__dataclass_fields__)
    what = ModelSettings(**{"model": "null", "protocol": protocol} | {k: v for k, v in given.items() if k in names})
    load = {"warmup_request_count": 0} | {k: v for k, v in given.items() if k not in names}
    plan = infer_plan(url_of(server, protocol), what, LevelSettings(**load))
    found: InferResults = ran(lambda: infer(plan, certify_s))
    return found


@BOTH
@ALONE
@pytest.mark.parametrize("n", [6, pytest.param(30, marks=pytest.mark.timing)])
def test_every_figure_is_what_the_server_did(request: pytest.FixtureRequest, null: Null, protocol: str, n: int) -> None:
    """Six at once on two instances are answered in three steps: the mean of six waits for one service."""
    within = WITHIN if request.node.get_closest_marker("timing") else WITHIN_BUSY
    ms, timed = (60, TIMED_QUICK) if n == 6 else (100, TIMED)
    server = null(timed, True)
    n_before = len(server.truth_list)
    done = inferred(server, protocol, batch_size=("1", "9"), concurrency=("1", "6"), request_count=n)
    truth = server.truth_list[n_before:]
    assert [(p.level.batch, p.level.concurrency) for p in done.points] == [(1, 1), (1, 6), (9, 1), (9, 6)]
    for i, point in enumerate(done.points):
        sent = truth[n * i : n * i + n]
        batch, at_a_time = point.level.batch, point.level.concurrency or 0
        assert [s.n_tokens for s in sent] == [[batch]] * n and {s.kind for s in sent} == {"infer"}
        took_ms = 1e3 * np.array([s.sent_s[0] - s.arrived_s for s in sent])
        latency = point.metrics.of_requests["request_latency"]
        way_ms = 3 if protocol == GRPC else 0  # that gRPC's threads take on a slow host, which the server does not see
        assert latency.mean == pytest.approx(took_ms.mean(), rel=within, abs=way_ms) and latency.mean > took_ms.mean()
        assert latency.percentiles[50] == pytest.approx(np.median(took_ms), rel=within, abs=way_ms)
        span_s = max(s.sent_s[0] for s in sent) - min(s.arrived_s for s in sent)
        assert point.metrics.output_tokens_per_s.value == pytest.approx(n * batch / span_s, rel=within)
        service_ms = ms * (1 + (batch - 1) / 40)
        assert point.metrics.output_tokens_per_s.value == pytest.approx(
            1e3 * batch * min(at_a_time, 2) / service_ms, rel=max(within, 0.06)
        ), "by arithmetic"
        assert point.server is not None and point.server.n == n and point.server.per_execution == batch
        assert point.server.whole_ms == pytest.approx(took_ms.mean(), rel=1e-6)
        queue_ms = 1e3 * np.mean([s.queue_s for s in sent])
        assert point.server.stages_ms["queue"] == pytest.approx(queue_ms, rel=1e-6, abs=1e-6)
        if n == 6:
            assert queue_ms == pytest.approx(service_ms if at_a_time == 6 else 0, rel=max(within, 0.06))
    assert done.model.instances == "2 on CPU" and done.model.max_batch == 128
    assert done.valid is None, "not certified, and not found to be slow"


@BOTH
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_datatype_goes_there_and_back(null: Null, protocol: str, binary: bool) -> None:
    """The null server counts elements and bytes, and answers with what it was sent; nothing is refused."""
    server = null(QUICK, True)
    rng = np.random.default_rng(0)

    async def asked() -> list[BenchRecord]:
        answers = []
        for datatype, dtype in DTYPES.items():
            if not binary and (protocol == GRPC or datatype in ("FP16", "BF16")):
                continue
            values = rng.integers(0, 2, (2, 5)).astype(dtype)
            if datatype == "BYTES":
                values = objects([b"x" * i for i in range(10)]).reshape(2, 5)
            target = InferTarget(url_of(server, protocol), f"null_{datatype}", "1", protocol, binary)
            async with transport(target, 1) as over:
                answer = BenchRecord()
                await over.send(over.body([InferTensor("INPUT0", datatype, values)]), answer)
                answers.append(answer)
        return answers

    answers = ran(asked)
    assert [(a.failure, a.detail) for a in answers] == [(None, "")] * len(answers)
    assert len(answers) == (14 if binary else 12 if protocol == HTTP else 0)


@ALONE
def test_requests_that_arrive_at_a_rate(null: Null) -> None:
    done = inferred(null(QUICK, True), request_rate=("200",), arrival_pattern="constant", request_count=60)
    (point,) = done.points
    assert point.level.rate == 200 and point.metrics.n == 60
    assert point.metrics.requests_per_s.value == pytest.approx(200, rel=0.25)


@BOTH
@ALONE
def test_the_client_is_certified_with_the_tensors_themselves(null: Null, protocol: str) -> None:
    done = inferred(
        null(QUICK, True), protocol, certify_s=0.2, model="null_FP32", shape=("INPUT0:1000",), request_count=4
    )
    found = done.certificate
    assert found is not None and found.streams == 1 and 10 < found.chunks_per_s < 60
    assert 0 <= found.delay_p50_ms < 5 and (found.cpu_share or 1.0) < 0.8


# What goes wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_fails_is_told_and_the_others_count(fault: str) -> None:
    expected = {"stall": Failure.TIMEOUT, "malformed": Failure.MALFORMED}.get(fault, Failure.STATUS)
    with NullProcess(NullTiming(ttft_ms="5", itl_ms="0", fault=fault, fault_every=2), over_grpc=True) as server:
        for protocol in (HTTP, GRPC):
            done = inferred(server, protocol, request_count=2, timeout_s=0.2)
            (point,) = done.points
            assert point.metrics.n == 1 and point.metrics.n_failed == 1
            kind = Failure.BROKEN_OFF if fault == "break" and protocol == HTTP else expected
            assert point.metrics.failures == {str(kind): 1}
            assert f"1 requests failed ({kind})" in report(done)["notes"][0]


@BOTH
def test_mistakes_are_said_before_anything_is_measured(null: Null, protocol: str) -> None:
    server = null(QUICK, True)
    n_before = len(server.truth_list)
    for kind, says, given in (
        (MachineError, "unknown model: 'gone' is not found", {"model": "gone"}),
        (MachineError, "version 7 is not found", {"model_version": "7"}),
        (ConfigError, "at most 128, its max_batch_size", {"batch_size": ("129",)}),
        (ConfigError, "takes no batches", {"model": "null_single", "batch_size": ("1,2",)}),
        (ConfigError, "--shape INPUT0:16", {"model": "null_INT8"}),
        (ConfigError, "an input: INPUT0, INPUT1", {"shape": ("INPUT9:3",)}),
        (ConfigError, "cannot be read", {"input_data": "nowhere.json"}),
        (ConfigError, "give it", {"model": ""}),
        (ConfigError, "leave one out", {"concurrency": ("1",), "request_rate": ("1",)}),
    ):
        with pytest.raises(kind) as caught:
            inferred(server, protocol, **given)
        assert says in str(caught.value)
    assert len(server.truth_list) == n_before


@BOTH
def test_a_server_that_is_not_there(null: Null, protocol: str) -> None:
    with NullProcess(QUICK, over_grpc=True) as gone:
        pass
    with pytest.raises(MachineError) as caught:
        inferred(gone, protocol)
    assert url_of(gone, protocol) in str(caught.value)


def test_a_page_that_is_no_model(null: Null) -> None:
    server = null(QUICK, True)
    for url in (f"{server.url}/v1/nothing", f"{server.url}/base"):
        with pytest.raises(MachineError, match="tells nothing of the model"):
            ran(partial(infer, infer_plan(url, ModelSettings(model="null"), LevelSettings()), 0))
    for url in ("x", "ftp://x:1", "x:y", "http://h:1/path"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            what = ModelSettings(model="null", protocol=GRPC)
            ran(partial(infer, infer_plan(url, what, LevelSettings()), 0))


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        infer_plan("x:1", ModelSettings(model="m", protocol=GRPC), LevelSettings())
    assert 'pip install "millrace[grpc]"' in str(caught.value)


# What is written


@ALONE
def test_the_files(null: Null, tmp_path: Path) -> None:
    done = inferred(null(QUICK, True), batch_size=("1,4",), concurrency=("1:2",), request_count=5)
    names = write_results(tmp_path, done)
    assert sorted(names) == ["perf_analyzer_b1.csv", "perf_analyzer_b4.csv", "report.html", "summary.json"]
    first, second = csv.DictReader((tmp_path / "perf_analyzer_b4.csv").read_text().splitlines())
    assert list(first) == [
        "Concurrency", "Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue",
        "Server Compute Input", "Server Compute Infer", "Server Compute Output", "Client Recv", "p50 latency",
        "p90 latency", "p95 latency", "p99 latency",
    ]  # fmt: skip
    point = done.points[3]
    latency, server = point.metrics.of_requests["request_latency"], point.server
    assert second["Concurrency"] == "2" and server is not None
    parts = sum(int(second[name]) for name in list(second)[2:9])
    assert parts == pytest.approx(1e3 * latency.mean, abs=3), "its parts are the whole, in microseconds"
    assert int(second["p99 latency"]) == round(1e3 * latency.percentiles[99])
    assert "Server Queue" not in perf_analyzer_csv([replace(p, server=None) for p in done.points])
    page = infer_page(done)
    assert page.count("<circle") == 4 and page.count("<polyline") == 2 and "instances: 1 on CPU" in page
    assert page == (tmp_path / "report.html").read_text() and "batch 4</span>" in page


def test_what_the_page_says_of_a_server_that_tells_little(null: Null) -> None:
    done = inferred(null(QUICK, True), request_count=3)
    bare = replace(
        done, model=replace(done.model, instances="", name="<b>"), points=[replace(p, server=None) for p in done.points]
    )
    page = infer_page(bare)
    assert "&lt;b&gt;" in page and "instances: the server does not say" in page and "tells no statistics" in page
    busy = replace(done, points=[replace(p, effort=ClientHealth(0.9)) for p in done.points])
    assert (
        busy.valid is False
        and done.valid is None
        and "INVALID" in infer_page(busy)
        and "at batch 1, 1 at a time" in infer_page(busy)
    )
    nothing = replace(done, points=[replace(p, metrics=replace(p.metrics, n=0)) for p in done.points])
    assert "No request was answered" in infer_page(nothing) and perf_analyzer_csv(nothing.points) == ""
