"""Tracers, what their files say, and spans without OpenTelemetry's packages."""

import json
from pathlib import Path
from typing import Any

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.tracing.otel_spans import OpenSpans
from millrace.model_repository.tracing.trace_context import Parent
from millrace.model_repository.tracing.trace_flags import OtlpSettings
from millrace.model_repository.tracing.tracer import Tracer
from tests.support.python_models import HEAD

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


class Told:
    """In the place of `SpanExporter`: what begins and what ends."""

    def __init__(self, settings: OtlpSettings | None = None) -> None:
        self.settings, self.began, self.ended = settings or OtlpSettings(), list[Any](), list[Any]()

    def begin(self, model: str, began_ns: int, parent: Parent | None) -> OpenSpans:
        self.began.append((model, began_ns, parent))
        return OpenSpans(None, _Span(model), 0, "")

    def begin_part(self, model: str, outer: OpenSpans) -> OpenSpans:
        self.began.append((model, outer.of_model.model, None))
        return OpenSpans(None, _Span(model), 0, "")

    def end(self, spans: OpenSpans, request: InferRequest, done_ns: int, error: Any, told: Any, *around: Any) -> None:
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
