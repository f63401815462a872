"""Triton's own clients on what operates a server: trace and log settings, the response cache, files of a load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.serve.settings import ServerSettings
from tests.support.repository import ADD_SUB, in_process, write_models
from tests.support.server import Threaded

pytestmark = pytest.mark.nightly
CLEAR = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Threaded]:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    cached = ADD_SUB + "response_cache { enable: true }"
    root = write_models(tmp_path_factory.mktemp("models"), {"simple": ADD_SUB, "cached": cached})
    traced = ServerSettings(port=0, trace_config=(f"triton,file={file}", "level=TIMESTAMPS", "rate=1"))
    flags = OperationFlags(cache_config=("local,size=1M",))
    explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    with in_process(root, traced, operations=flags, grpc_port=0, **explicit) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def triton(request: pytest.FixtureRequest, server: Threaded) -> Iterator[tuple[Any, Any]]:
    """The module of a protocol, and a client."""
    if request.param == "http":
        import tritonclient.http as module

        url = server.url.removeprefix("http://")
    else:
        import tritonclient.grpc as module

        url = server.grpc_url
    with module.InferenceServerClient(url) as client:
        yield module, client
        client.update_trace_settings(model_name="simple", settings=CLEAR)
        client.update_trace_settings(settings=CLEAR)


def settings(told: Any) -> dict[str, Any]:
    """As HTTP has them."""
    if isinstance(told, dict):
        return told
    found: dict[str, Any] = {}
    for key, one in told.settings.items():
        if hasattr(one, "value"):
            found[key] = list(one.value) if key == "trace_level" else one.value[0]
        else:
            found[key] = getattr(one, one.WhichOneof("parameter_choice"))
    return found


def added(module: Any, client: Any, model: str, value: int) -> Any:
    data = np.full((1, 16), value, np.int32)
    inputs = [module.InferInput(f"INPUT{i}", data.shape, "INT32") for i in range(2)]
    for one in inputs:
        one.set_data_from_numpy(data)
    return client.infer(model, inputs).as_numpy("OUTPUT0")


def test_trace_settings_as_tritons_tests_change_them(triton: tuple[Any, Any], file: Path) -> None:
    from tritonclient.utils import InferenceServerException

    _, client = triton
    first = {"trace_file": str(file), "trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1",
             "log_frequency": "0", "trace_mode": "triton"}  # fmt: skip
    assert settings(client.get_trace_settings()) == settings(client.get_trace_settings(model_name="simple")) == first
    with pytest.raises(InferenceServerException, match="trace file location can not be updated"):
        client.update_trace_settings(model_name="simple", settings={"trace_file": "model.log"})
    both = {"trace_level": ["TIMESTAMPS", "TENSORS"]}
    assert settings(client.update_trace_settings(settings=both)) == {**first, **both}
    assert settings(client.get_trace_settings(model_name="simple")) == {**first, **both}
    client.update_trace_settings(model_name="simple", settings={"trace_rate": "12", "log_frequency": "34"})
    client.update_trace_settings(settings={"trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]})
    off = {**first, "trace_level": ["OFF"]}
    assert settings(client.update_trace_settings(settings={"trace_rate": None, "trace_count": None})) == off
    told = client.update_trace_settings(model_name="simple", settings={"trace_rate": None, "trace_level": None})
    assert settings(told) == {**off, "log_frequency": "34"}
    with pytest.raises(InferenceServerException, match="Request for unknown model : does-not-exist"):
        client.get_trace_settings(model_name="does-not-exist")


def test_a_traced_inference(triton: tuple[Any, Any], file: Path) -> None:
    module, client = triton
    added(module, client, "simple", 3)
    client.update_trace_settings(settings={"trace_level": ["OFF"]})
    last = json.loads(file.read_text())[-1]["timestamps"]
    assert [one["name"] for one in last][:3] == ["REQUEST_START", "QUEUE_START", "COMPUTE_START"]


def test_log_settings(triton: tuple[Any, Any]) -> None:
    from tritonclient.utils import InferenceServerException

    _, client = triton
    before = settings(client.get_log_settings())
    assert set(before) == {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}
    assert settings(client.update_log_settings({"log_verbose_level": 1, "log_error": False}))["log_error"] is False
    changed = {key: value for key, value in before.items() if key != "log_file"}
    assert settings(client.update_log_settings(changed)) == before
    with pytest.raises(InferenceServerException, match="log file location can not be updated"):
        client.update_log_settings({"log_file": "x"})


def test_files_come_with_a_load(triton: tuple[Any, Any]) -> None:
    from tritonclient.utils import InferenceServerException

    module, client = triton
    config = {"backend": "add_sub", "max_batch_size": 8}
    for side in ("input", "output"):
        names = [f"{side.upper()}{i}" for i in range(2)]
        config[side] = [{"name": name, "data_type": "TYPE_INT32", "dims": [16]} for name in names]
    client.load_model("brought", config=json.dumps(config), files={"file:2/model.bin": b"\x00\xff"})
    assert client.is_model_ready("brought", "2") and (added(module, client, "brought", 4) == 8).all()
    client.unload_model("brought")
    with pytest.raises(InferenceServerException, match="override files are given without"):
        client.load_model("brought", files={"file:2/model.bin": b""})


def test_answers_are_kept(triton: tuple[Any, Any]) -> None:
    module, client = triton
    value = 5 if module.__name__.endswith("http") else 6
    for _ in range(3):
        assert (added(module, client, "cached", value) == 2 * value).all()
    told = client.get_inference_statistics("cached")
    if isinstance(told, dict):
        stages = told["model_stats"][0]["inference_stats"]
        counts = [stages[stage]["count"] for stage in ("cache_hit", "cache_miss")]
    else:
        stages = told.model_stats[0].inference_stats
        counts = [stages.cache_hit.count, stages.cache_miss.count]
    assert counts[0] == 2 * counts[1] > 0
