"""/metrics of tensor models: which families there are, and what they say."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from tests.serve.support import Fake, running
from tests.support.prometheus import series
from tests.support.python_models import ANY, HEAD, OWN, SAY, write
from tests.support.repository import REPEAT, identity, in_process, write_models

MODEL = """max_batch_size: 2 metric_tags { key: "team" value: "a\\"b" }
model_metrics { metric_control { metric_identifier { family: "nv_inference_queue_duration_histogram_us" }
                                 histogram_options { buckets: [ 0.5, 1e9 ] } } }"""
PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


def samples(url: str) -> dict[tuple[str, str], dict[str, float]]:
    """By name and model: values by the label that is neither."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in series(url):
        more = {k: v for k, v in one.labels.items() if k not in ("model", "version", "_team")}
        found.setdefault((one.name, one.labels.get("model", "")), {})[",".join(more.values())] = one.value
    return found


def infer(url: str, model: str, n: int, action: str = "infer") -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [n, 1], "datatype": "FP32", "data": [0] * n}]}
    assert httpx.post(f"{url}/v2/models/{model}/{action}", json=body).status_code == 200


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_models(tmp_path, {"m": identity("FP32", "1", MODEL), "repeat": REPEAT})


def test_phases_are_told_as_histograms(root: Path) -> None:
    with in_process(root) as served:
        for n in (1, 2, 1):
            infer(served.url, "m", n)
        body = {"IN": [1, 2, 3], "DELAY": [0, 0, 0], "WAIT": 0}
        assert httpx.post(f"{served.url}/v2/models/repeat/generate_stream", json=body).text.count("data:") == 3
        found = samples(served.url)
        text = httpx.get(f"{served.url}/metrics").text
    for phase in PHASES:
        name = f"nv_inference_{phase}_duration_histogram_us"
        buckets = found[f"{name}_bucket", "m"]
        assert list(buckets.values()) == sorted(buckets.values()) and buckets["+Inf"] == 3
        assert found[f"{name}_count", "m"] == {"": 3}
        (all_us,) = found[f"{name}_sum", "m"].values()
        (counted_us,) = found[f"nv_inference_{phase}_duration_us", "m"].values()
        assert counted_us <= all_us < counted_us + 1, "the counter is of whole microseconds"
    assert list(found["nv_inference_queue_duration_histogram_us_bucket", "m"]) == ["0.5", "1e+09", "+Inf"]
    assert len(found["nv_inference_queue_duration_histogram_us_bucket", "repeat"]) == 28
    first = "nv_inference_first_response_histogram_ms"
    assert found[f"{first}_bucket", "repeat"] == {"100": 1, "500": 1, "2000": 1, "5000": 1, "+Inf": 1}
    assert (f"{first}_bucket", "m") not in found, "of decoupled models"
    assert re.search(rf'^{first}_sum{{model="repeat",version="1"}} \d+$', text, re.MULTILINE), "whole milliseconds"
    assert 'nv_inference_count{model="m",version="1",_team="a\\"b"} 4\n' in text
    assert not any("summary" in name for name, _ in found)


def test_what_is_told_can_be_chosen(root: Path) -> None:
    said = ("summary_latencies=true", "summary_quantiles=0.5,0.99", "histogram_latencies=off", "counter_latencies=off")
    with in_process(root, operations=OperationFlags(metrics_config=said)) as served:
        infer(served.url, "m", 1)
        found = samples(served.url)
    for phase in PHASES:
        summary = found[f"nv_inference_{phase}_summary_us", "m"]
        assert list(summary) == ["0.5", "0.99"] and summary["0.5"] == summary["0.99"]
        assert found[f"nv_inference_{phase}_summary_us_count", "m"] == {"": 1}
        assert found[f"nv_inference_{phase}_summary_us_sum", "m"][""] == pytest.approx(summary["0.5"])
    assert not any("histogram" in name or "duration_us" in name for name, _ in found)
    assert found["nv_inference_count", "m"] == {"": 1}


def test_names_are_those_that_dashboards_know_or_begin_as_ours(root: Path) -> None:
    """Triton's and vLLM's as they have them, `http_requests` among these; `process_` those of Prometheus' own
    libraries.
    """
    cached = OperationFlags(cache_config=("local,size=1M",), metrics_config=("summary_latencies=true",))
    with in_process(root, operations=cached) as served:
        infer(served.url, "m", 1)
        names = {one.name for one in series(served.url)}
    with running(Fake()) as server:
        names |= {one.name for one in series(server.url)}
    known = ("nv_", "vllm:", "http_requests", "millrace:", "process_")
    assert not [name for name in names if not name.startswith(known)]
    assert {name.partition(":")[0] for name in names if ":" in name} == {"vllm", "millrace"}
    assert {"millrace:model_ready", "millrace:batches_closed", "millrace:response_cache_bytes"} <= names
    assert "millrace:engine_healthy" in names


FAILS = {"raises": "raise ValueError('x')", "answers": "return [pb_utils.InferenceResponse(error=ERROR)]"}
ERROR_RESPONSES = """
        sender = requests[0].get_response_sender()
        sender.send(said("fine"))
        sender.send(pb_utils.InferenceResponse(error=ERROR))
        sender.send(flags=1)
"""


@pytest.mark.parametrize("where", ["", OWN], ids=["here", "own"])
def test_failures_of_models_are_counted(tmp_path: Path, where: str) -> None:
    head = (
        HEAD.replace("class", "ERROR = pb_utils.TritonError('bad')\n\n\nclass") + "    def execute(self, requests):\n"
    )
    for name, does in FAILS.items():
        write(tmp_path, name, f"{head}        {does}\n", ANY % where)
    write(
        tmp_path, "streams", head + ERROR_RESPONSES + SAY, ANY % (where + "model_transaction_policy {decoupled: true}")
    )
    write(tmp_path, "broken", "import there_is_no_such_module\n" + head + "        pass\n", ANY % where)
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": (*FAILS, "streams")}
    with in_process(tmp_path, **flags) as served:
        assert httpx.post(f"{served.url}/v2/repository/models/broken/load", json={}).status_code == 500
        for name in FAILS:
            assert httpx.post(f"{served.url}/v2/models/{name}/infer", json=body).status_code == 500
        lines = {"accept": "application/x-ndjson"}
        streamed = httpx.post(f"{served.url}/v2/models/streams/infer", json=body, headers=lines)
        assert [set(json.loads(line)) >= {"error"} for line in streamed.text.splitlines()] == [False, True]
        found = samples(served.url)
        for name in (*FAILS, "streams"):
            assert found["nv_inference_request_failure", name]["BACKEND"] == 1, name
            assert found["nv_inference_request_success", name][""] == 0, name
            told = httpx.get(f"{served.url}/v2/models/{name}/stats").json()["model_stats"][0]
            assert told["inference_stats"]["fail"]["count"] == 1, name
            assert found["nv_model_load_duration_secs", name][""] > 0
        assert found["millrace:model_load_failed", "broken"] == {"": 1}
        assert ("nv_model_load_duration_secs", "broken") not in found
        assert httpx.post(f"{served.url}/v2/repository/models/broken/unload", json={}).status_code == 200
        assert ("millrace:model_load_failed", "broken") not in samples(served.url)
