"""What models count themselves, as /metrics shows it."""

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.model_repository.metrics.custom_metrics import CustomMetrics
from millrace.model_repository.request.status_code import StatusError
from millrace.prometheus import metrics_text
from tests.support.python_models import ANY, HEAD, asked, loaded, one, text, write
from tests.support.triton_models import CUSTOM_METRICS, SQUARE_CONFIG


def read(told: str) -> dict[str, float]:
    """By Prometheus' own reader."""
    found = {}
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_tritons_example_of_metrics(tmp_path: Path) -> None:
    write(tmp_path, "m", CUSTOM_METRICS, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            for n in (0, 2, 9):
                await model.infer(asked(model, IN=np.array([n], np.int32)))
            told = metrics_text(repository.custom.collect())
            assert 'requests_process_latency_ns{model="m",version="1"} 10.5\n' in told
            assert '# HELP sizes Elements\\nof "IN"\n# TYPE sizes histogram\n' in told
            assert read(told) == {
                "requests_process_latency_ns_total{model=m,version=1}": 10.5, "sizes_count{}": 3, "sizes_sum{}": 11,
                "sizes_bucket{le=0.5}": 1, "sizes_bucket{le=2}": 2, "sizes_bucket{le=+Inf}": 3,
            }  # fmt: skip
            await repository.unload("m")
            await model.retire()
            assert metrics_text(repository.custom.collect()) == "", "its metrics go with it"

    asyncio.run(run())


COUNTER, GAUGE, HISTOGRAM = range(3)


def test_metrics_with_equal_labels_are_one_and_live_as_long_as_anybody_has_them() -> None:
    custom = CustomMetrics()
    first, second = custom.family("a", "first", GAUGE), custom.family("a", "second", GAUGE)
    one, other = custom.metric(first, {"x": "1", "y": "2"}, None), custom.metric(second, {"y": "2", "x": "1"}, None)
    custom.metric(first, {"x": "2"}, None)
    assert custom.change("increment", one, 2) == 2 and custom.change("increment", other, -3) == -1
    assert custom.change("set", one, float("inf")) == custom.change("value", other, 0)
    assert read(metrics_text(custom.collect())) == {"a{x=1,y=2}": float("inf"), "a{x=2}": 0}
    assert "# HELP a first" in metrics_text(custom.collect())
    custom.drop(one)
    custom.drop(one)
    custom.drop(first)
    assert "a{x=1,y=2}" in read(metrics_text(custom.collect()))
    custom.drop(other)
    assert read(metrics_text(custom.collect())) == {"a{x=2}": 0}
    with pytest.raises(StatusError, match="Metric has been invalidated"):
        custom.change("value", one, 0)


def test_labels_are_escaped() -> None:
    custom = CustomMetrics()
    label = 'a "quote", \\ and\na line'
    custom.change("increment", custom.metric(custom.family("a", "", COUNTER), {"x": label}, None), 0.1)
    (family,) = text_string_to_metric_families(metrics_text(custom.collect()))
    assert [(s.labels["x"], s.value) for s in family.samples] == [(label, 0.1)]


WRONG = [
    ("pb_utils.MetricFamily('1a', '', 0)", "Error when creating MetricFamily: Invalid metric name '1a'"),
    ("pb_utils.MetricFamily('nv_inference_count', '', 0)", "names that begin with nv_"),
    ("pb_utils.MetricFamily('a', '', 3)", "Unsupported kind passed to MetricFamily constructor."),
    ("a = pb_utils.MetricFamily('a', '', 0); pb_utils.MetricFamily('a', '', 1)",
     "Metric name 'a' already exists with different type: COUNTER"),
    ("pb_utils.MetricFamily('a', '', 0).Metric(labels={'x': 1})",
     "Error when creating Metric: Parameter [x] must have a type of TRITONSERVER_PARAMETER_STRING"),
    ("pb_utils.MetricFamily('a', '', 0).Metric(labels={'__x': '1'})", "Invalid label name '__x'"),
    ("pb_utils.MetricFamily('a', '', 0).Metric(buckets=[1])", "Unexpected args found in counter Metric constructor."),
    ("pb_utils.MetricFamily('a', '', 2).Metric()", "Bucket boundaries not found in Metric args."),
    ("pb_utils.MetricFamily('a', '', 2).Metric(buckets=[2, 1])", "Bucket Boundaries must be strictly sorted"),
    ("pb_utils.MetricFamily('a', '', 0).Metric().increment(-1)", "Failed to increment metric value: "
     "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."),
    ("pb_utils.MetricFamily('a', '', 0).Metric().set(1)", "Failed to set metric value: "
     "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
    ("pb_utils.MetricFamily('a', '', 1).Metric().observe(1)",
     "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
    ("pb_utils.MetricFamily('a', '', 2).Metric(buckets=[1]).value()",
     "Failed to get metric value: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"),
    ("pb_utils.MetricFamily('a', '', 2).Metric(buckets=[1]).increment(1)",
     "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment"),
]  # fmt: skip


def test_what_a_model_may_not_count(tmp_path: Path, small_heap: None) -> None:
    named = [(body.replace("'a'", f"'a{i}'"), says.replace("'a'", f"'a{i}'")) for i, (body, says) in enumerate(WRONG)]
    cases = "".join(f"        if number == {i}: {body}\n" for i, (body, _) in enumerate(named))
    code = HEAD + "    def execute(self, requests):\n        number = int(requests[0].inputs()[0].as_numpy()[0])\n"
    write(tmp_path, "m", code + cases, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            for i, (_, says) in enumerate(named):
                with pytest.raises(StatusError) as failed:
                    await model.infer(asked(model, IN=text(str(i))))
                assert says in str(failed.value)
            del failed  # which holds the last of them
            async with asyncio.timeout(5):  # its thread may not be done with it
                while metrics_text(repository.custom.collect()):
                    await asyncio.sleep(0.01)
                    gc.collect()

    asyncio.run(run())


def test_metrics_without_end_are_refused(tmp_path: Path) -> None:
    body = "family = pb_utils.MetricFamily('a', '', 0); self.all = [family.Metric({'x': str(i)}) for i in range(20000)]"
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match="models of this server have 10000 metrics"):
                await one(repository, "m", text("x"))

    asyncio.run(run())
