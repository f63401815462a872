"""Settings of traces: flags, a model's before the server's, and mistakes in them."""

from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.tracing import trace_flags
from millrace.model_repository.tracing import tracer as tracing
from millrace.model_repository.tracing.trace_flags import TraceFlags
from millrace.model_repository.tracing.tracer import Tracer
from tests.support.traces import Told, come, tracer


def test_a_models_settings_stand_before_the_servers(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t")
    first = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0",
             "trace_file": str(tmp_path / "t"), "trace_mode": "triton"}  # fmt: skip
    assert one.settings_dict() == one.settings_dict("m") == first
    one.change({"trace_rate": 12, "log_frequency": 34}, "m")
    one.change({"trace_rate": 56, "trace_count": 78, "trace_level": ("OFF",)})
    assert one.settings_dict() == {**first, "trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]}
    assert one.settings_dict("m") == {**first, "trace_level": ["OFF"], "trace_rate": "12", "trace_count": "78",
                             "log_frequency": "34"}  # fmt: skip
    assert not one.is_on
    one.change({"trace_rate": None, "trace_count": None})
    assert one.settings_dict() == {**first, "trace_level": ["OFF"]}
    one.change({"trace_rate": None, "trace_level": None}, "m")
    assert one.settings_dict("m") == {**first, "trace_level": ["OFF"], "log_frequency": "34"}
    one.change({"trace_level": None})
    assert one.is_on and one.settings_dict("m") == {**first, "log_frequency": "34"}
    one.change({"trace_count": 3}, "m")
    assert come(one, "m", 2) == [0, 1] and one.settings_dict("m")["trace_count"] == "1"
    one.change({"trace_rate": 1})
    assert one.settings_dict("m")["trace_count"] == "1", "what was taken stays taken"
    one.change({"trace_count": None, "log_frequency": None}, "m")
    assert one.settings_dict("m") == first
    with pytest.raises(StatusError, match="trace file name is not given"):
        Tracer().change({"trace_level": ("TIMESTAMPS",)})


def test_flags_are_tritons() -> None:
    said = ("triton,file=/tmp/t.json", "level=TIMESTAMPS", "level=TENSORS", "rate=7", "count=9",
            "triton,log-frequency=5", "mode=triton")  # fmt: skip
    assert Tracer.from_flags(said).settings_dict() == {
        "trace_file": "/tmp/t.json", "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "7", "trace_count": "9",
        "log_frequency": "5", "trace_mode": "triton",
    }  # fmt: skip
    assert not Tracer.from_flags(()).is_on


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
        Tracer.from_flags(said)


def test_settings_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SpanExporter", Told)
    monkeypatch.setattr(trace_flags, "check_extra", lambda: None)
    one = Tracer.from_flags(("mode=opentelemetry", "opentelemetry,url=https://c/v1/traces", "level=TIMESTAMPS",
                     "rate=0", "opentelemetry,resource=service.name=mill", "resource=zone=b=c", "bsp_max_queue_size=99",
                     "opentelemetry,bsp_max_export_batch_size=9"))  # fmt: skip
    told = {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "0", "trace_count": "-1", "trace_mode": "opentelemetry",
        "url": "https://c/v1/traces", "resource": ["service.name=mill", "zone=b=c"], "bsp_max_queue_size": "99",
        "bsp_schedule_delay": "5000", "bsp_max_export_batch_size": "9",
    }  # fmt: skip
    assert one.settings_dict() == one.settings_dict("m") == told
    one.change({"trace_rate": 5}, "m")
    assert one.settings_dict("m") == {**told, "trace_rate": "5"}
    for change, says in (({"trace_level": ("TENSORS",)}, "TENSORS"), ({"log_frequency": 2}, "log_frequency")):
        with pytest.raises(StatusError, match=f"{says} is of trace mode triton"):
            one.change(change)


def test_without_the_extra_one_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        TraceFlags.from_flags(("mode=opentelemetry",))
    assert "mode=opentelemetry without OpenTelemetry's SDK" in refused.value.what
    assert refused.value.expected == 'pip install "millrace[otel]"'
