"""Triton's metrics of tensor models, under its names and with its labels, in Prometheus' text format."""

from collections.abc import Callable, Iterable, Iterator

from millrace.serve.inference.model import Model
from millrace.serve.inference.statistics import REASONS

_Samples = Callable[[Model], Iterable[tuple[str, float]]]  # further labels as they are written, and a value


def _stage(name: str, *, of: str = "ns") -> _Samples:
    def samples(model: Model) -> Iterator[tuple[str, float]]:
        duration = model.statistics.stages[name]
        yield "", duration.count if of == "count" else duration.ns // 1000

    return samples


def _failures(model: Model) -> Iterator[tuple[str, float]]:
    for reason in REASONS:
        yield f',reason="{reason}"', model.statistics.failures[reason]


def _closed(model: Model) -> Iterator[tuple[str, float]]:
    for closed, n in model.statistics.closed.items():
        yield f',closed="{closed.value}"', n


# name, type, what it says, samples of a model
_FAMILIES: tuple[tuple[str, str, str, _Samples], ...] = (
    ("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes",
     _stage("success", of="count")),
    ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes", _failures),
    ("nv_inference_count", "counter", "Number of inferences performed (does not include cached requests)",
     lambda m: [("", m.statistics.n_inferences)]),
    ("nv_inference_exec_count", "counter", "Number of model executions performed (does not include cached requests)",
     lambda m: [("", m.statistics.n_executions)]),
    ("nv_inference_request_duration_us", "counter",
     "Cumulative inference request duration in microseconds (includes cached requests)", _stage("success")),
    ("nv_inference_queue_duration_us", "counter",
     "Cumulative inference queuing duration in microseconds (includes cached requests)", _stage("queue")),
    ("nv_inference_compute_input_duration_us", "counter",
     "Cumulative compute input duration in microseconds (does not include cached requests)", _stage("compute_input")),
    ("nv_inference_compute_infer_duration_us", "counter",
     "Cumulative compute inference duration in microseconds (does not include cached requests)",
     _stage("compute_infer")),
    ("nv_inference_compute_output_duration_us", "counter",
     "Cumulative inference compute output duration in microseconds (does not include cached requests)",
     _stage("compute_output")),
    ("nv_inference_pending_request_count", "gauge",
     "Instantaneous number of pending requests awaiting execution per-model.", lambda m: [("", m.n_pending)]),
    ("millrace_batches_closed", "counter", "Batches, by why they had no more requests", _closed),
)  # fmt: skip


def metrics_text(models: Iterable[Model]) -> str:
    """models: every version that is served; families without a sample are left out"""
    everybody = [(model, f'model="{_escaped(model.name)}",version="{model.version}"') for model in models]
    lines: list[str] = []
    for name, kind, help_text, samples in _FAMILIES:
        found = [f"{name}{{{labels}{more}}} {value}" for m, labels in everybody for more, value in samples(m)]
        if found:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *found]
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
