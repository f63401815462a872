"""The dashboard and the alerts of examples/monitoring: every query is answered by what our servers tell."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from tests.serve.support import Fake, running
from tests.support.prometheus import Series, series
from tests.support.repository import REPEAT, identity, in_process, write_models

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
# Prometheus says itself whether it could ask, and adds to every series whom it asked.
OWN, ADDED = [Series("up", {}, 1.0)], {"job": "millrace", "instance": "localhost:8002"}
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?(?!\s*\()(?=\s*(?:\[|[)\s,+*/<>=-]|$))")
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "min", "max", "avg", "count", "by"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Series]:
    """By a server of tensor models, and one of a language model, that have answered something."""
    models = {
        "m": identity("FP32", "1", "max_batch_size: 2 dynamic_batching { } response_cache { enable: true }"),
        "repeat": REPEAT,
    }
    root = write_models(tmp_path_factory.mktemp("models"), models)
    flags = OperationFlags(cache_config=("local,size=1M",))
    with in_process(root, operations=flags) as tensors, running(Fake()) as texts:
        body: Any = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}]}
        assert httpx.post(f"{tensors.url}/v2/models/m/infer", json=body).status_code == 200
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{texts.url}/v1/completions", json=body).status_code == 200
        found = [*series(tensors.url), *series(texts.url), *OWN]
    return [Series(one.name, one.labels | ADDED, one.value) for one in found]


def dashboard() -> list[tuple[str, str]]:
    """(query, legend), those of its variables among them."""
    told = json.loads((FOLDER / "grafana.json").read_text())
    targets = [target for panel in told["panels"] for target in panel.get("targets", ())]
    variables = [v["query"]["query"] for v in told["templating"]["list"] if v["type"] == "query"]
    looked_up = [re.fullmatch(r"label_values\((.+), (\w+)\)", query) for query in variables]
    return [
        *((t["expr"], t["legendFormat"]) for t in targets),
        *((f"sum by ({m[2]}) ({m[1]})", f"{{{{{m[2]}}}}}") for m in looked_up if m),
    ]


def alerts() -> list[tuple[str, str]]:
    """(query, what is said of it)"""
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [(rule["expr"], " ".join(rule["annotations"].values())) for g in groups for rule in g["rules"]]


QUERIES = [*dashboard(), *alerts()]


def selectors(query: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, [(label, operator, value)]) of a query in PromQL."""
    plain = _GROUPED.sub("", re.sub(r"\[[^\]]*\]", "", query))
    for name, matchers in _SELECTOR.findall(plain):
        if name not in _WORDS and not name[0].isdigit():
            yield name, _MATCHER.findall(matchers)


def matches(one: Series, matchers: Sequence[tuple[str, str, str]]) -> bool:
    """A label that it has not is no match here, whatever the operator."""
    for label, operator, value in matchers:
        value = re.sub(r"\$\w+", ".*", value)
        fits = label in one.labels and re.fullmatch(value if "~" in operator else re.escape(value), one.labels[label])
        if label not in one.labels or bool(fits) is operator.startswith("!"):
            return False
    return True


def wrong(query: str, says: str, told: Sequence[Series]) -> str:
    """Why what is told does not answer it; empty: it does."""
    grouped = {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",")}
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", says))
    named = list(selectors(query))
    for name, matchers in named:
        found = [one for one in told if one.name == name and matches(one, matchers)]
        if not found:
            return f"nothing is {name} with {matchers}"
        missing = (grouped | (shown - {"value"})) - set(found[0].labels)
        if missing:
            return f"{name} has no label {sorted(missing)}"
    return "" if named else "it names no metric"


@pytest.mark.parametrize("query, says", QUERIES)
def test_our_metrics_answer(query: str, says: str, told: list[Series]) -> None:
    assert wrong(query, says, told) == ""


@pytest.mark.parametrize(
    "query, says",
    [
        ("count(nv_inference_count) by (instance)", ""),
        ("sum(rate(nv_inference_count[1m])) by (instance)", "{{instance}}"),
        ("sum(nv_inference_request_success) by (instance)", ""),
        ("sum(nv_inference_request_failure) by (instance)", ""),
        ("sum(rate(nv_inference_compute_infer_duration_us[30s])) by (model)", "{{model}}"),
        ("rate(nv_inference_queue_duration_us[30s]) / (1 + rate(nv_inference_request_success[30s]))", "{{instance}}"),
    ],
)
def test_a_dashboard_of_tritons_is_answered(query: str, says: str, told: list[Series]) -> None:
    """By what the one asks for that comes with Triton (deploy/k8s-onprem); pods are the cluster's labels."""
    assert wrong(query, says, told) == ""


def test_all_queries_were_found() -> None:
    assert len(dashboard()) >= 30 and len(alerts()) >= 8
    text = (FOLDER / "grafana.json").read_text()
    assert text.count('"expr"') + text.count("label_values(") // 2 == len(dashboard())


@pytest.mark.parametrize(
    "query, says, fragment",
    [
        ("sum(rate(nv_inference_sucess[5m]))", "", "nothing is nv_inference_sucess"),
        ('sum(nv_inference_count{modell="m"})', "", "nothing is nv_inference_count"),
        ('nv_inference_request_failure{reason="TIMEOUT"}', "", "TIMEOUT"),
        ("sum by (modell) (nv_inference_count)", "", "no label ['modell']"),
        ("nv_inference_count", "{{path}}", "no label ['path']"),
        ("rate(nv_inference_count[5m]) / rate(nv_inference_exec_counts[5m])", "", "nv_inference_exec_counts"),
        ("vector(1)", "", "names no metric"),
    ],
)
def test_a_wrong_name_is_found(query: str, says: str, fragment: str, told: list[Series]) -> None:
    assert fragment in wrong(query, says, told)


def test_prometheus_is_told_where_rules_and_metrics_are() -> None:
    told = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert told["rule_files"] == ["rules.yml"]
    (job,) = told["scrape_configs"]
    assert job["job_name"] == ADDED["job"] and job["static_configs"] == [{"targets": [ADDED["instance"]]}]
