"""What backends of networks share, without their packages: files, threads, parameters, completion, comparison."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.machine.cpu import usable_cores
from millrace.model_repository.backends import BACKENDS, create_backend, framework_backend
from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    TensorSignature,
    check_signatures,
    merge_signature,
)
from millrace.model_repository.config.autocomplete import complete_config
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.ragged_batch import RaggedBatch
from tests.support.loaded import Loaded, refused
from tests.support.sequences import part

ROWS = TensorSignature("x", "FP32", (-1, 4)), TensorSignature("y", "FP32", (-1, 2))
SIDES = """input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }"""


def config(text: str) -> ModelConfig:
    read = read_config(text.encode(), Path("config.pbtxt"))
    assert not read.problems, read.problems
    return complete_config(read.config, "net", ())[0]


def test_what_a_file_says_completes_what_is_not_said() -> None:
    found = config_json(merge_signature(config('backend: "x"'), [ROWS[0]], [ROWS[1]]))
    assert found["max_batch_size"] == 4 and found["dynamic_batching"]["preferred_batch_size"] == [4]
    assert [(i["name"], i["data_type"], i["dims"]) for i in found["input"]] == [("x", "TYPE_FP32", [4])]
    whole = config_json(
        merge_signature(config('backend: "x"'), [replace(ROWS[0], dims=(3, 4))], [TensorSignature("n", "INT64", ())])
    )
    assert whole["max_batch_size"] == 0 and whole["input"][0]["dims"] == [3, 4]
    assert whole["output"][0]["dims"] == [1] and whole["output"][0]["reshape"] == {"shape": []}
    said = config_json(merge_signature(config('backend: "x" max_batch_size: 2 ' + SIDES), [ROWS[0]], [ROWS[1]]))
    assert said["max_batch_size"] == 2 and "dynamic_batching" not in said
    only_input = SIDES.split(" output")[0]
    half = config_json(merge_signature(config('backend: "x" max_batch_size: 2 ' + only_input), [ROWS[0]], [ROWS[1]]))
    assert half["output"][0]["dims"] == [2] and half["max_batch_size"] == 2


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (TensorSignature("x", "", (-1,), "complex64"), "tensor 'x' has the type complex64, which is not supported"),
        (TensorSignature("x", "FP32", None), "tensor 'x' has any number of dimensions: say its dims in config.pbtxt"),
    ],
)
def test_what_no_configuration_can_say_is_named(told: TensorSignature, what: str) -> None:
    with pytest.raises(StatusError, match=what):
        merge_signature(config('backend: "x"'), [told], [ROWS[1]])


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (TensorSignature("z", "FP32", (-1, 4)), "unexpected inference input 'x', allowed inputs are: z"),
        (
            TensorSignature("x", "FP16", (-1, 4)),
            "tensor 'x': the model expects data-type FP16 but the model configuration",
        ),
        (TensorSignature("x", "", (-1, 4), "complex64"), "the model expects data-type complex64 but"),
        (
            TensorSignature("x", "FP32", (-1, 5)),
            r"expects 2 dimensions \(shape \[-1, 5\]\) but .* making complete shape \[-1, 4\]",
        ),
        (TensorSignature("x", "FP32", (-1,)), r"expects 1 dimensions \(shape \[-1\]\) but .* specifies 2 dimensions"),
        (
            TensorSignature("x", "FP32", (8, 4)),
            r"the first dimension must be -1; but shape expected by the model is \[8, 4\]",
        ),
        (TensorSignature("x", "FP32", ()), r"expects 0 dimensions \(shape \[\]\) but"),
    ],
)
def test_a_configuration_of_another_file(told: TensorSignature, what: str) -> None:
    said = config('backend: "x" max_batch_size: 8 ' + SIDES)
    with pytest.raises(StatusError, match=what):
        check_signatures(said, [told], [ROWS[1]], RaggedBatch(said))


def test_what_a_file_does_not_say_is_not_compared() -> None:
    said = config('backend: "x" max_batch_size: 8 ' + SIDES)
    ragged = RaggedBatch(said)
    check_signatures(said, [TensorSignature("x", None, None)], [TensorSignature("y", None, None)], ragged)
    check_signatures(
        said,
        [TensorSignature("x", "FP32", (-1, -1))],
        [ROWS[1], TensorSignature("more", "FP32", (-1,))],
        RaggedBatch(said),
    )
    with pytest.raises(StatusError, match="configuration expects 1 inputs, model provides 2"):
        check_signatures(said, [ROWS[0], TensorSignature("more", "FP32", (-1,))], [ROWS[1]], RaggedBatch(said))


def test_parameters_reach_their_settings(caplog: pytest.LogCaptureFixture) -> None:
    said = config('backend: "x" ' + " ".join(
        f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}'
        for k, v in {"threads": "3", "fast": "TRUE", "rt.mode": "a=b", "treads": "1", "how": "latency"}.items()
    ))  # fmt: skip
    found: dict[str, object] = {}
    settings: dict[str, framework_backend.Setting] = {
        "threads": lambda key, text: found.update({key: framework_backend.number(said, key, text)}),
        "fast": lambda key, text: found.update({key: framework_backend.flag(said, key, text)}),
        "how": lambda key, text: found.update({key: framework_backend.choice(said, key, text, ("LATENCY", "NONE"))}),
    }
    framework_backend.set_parameters(said, settings, {"rt.": lambda key, text: found.update({key: text})})
    assert found == {"threads": 3, "fast": True, "rt.mode": "a=b", "how": "LATENCY"}
    assert "parameter 'treads' changes nothing; did you mean \"threads\"?" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    for text in ("-1", "4097", "", "1e3", "٣", "9" * 5000):
        with pytest.raises(StatusError, match=r"'threads' of model 'net': .* a number from 0 to 4096 is expected"):
            framework_backend.number(said, "threads", text)
    with pytest.raises(StatusError, match="'yes', 0 or 1 is expected"):
        framework_backend.flag(said, "fast", "yes")
    with pytest.raises(StatusError, match="'x', one of LATENCY, NONE is expected"):
        framework_backend.choice(said, "how", "x", ("LATENCY", "NONE"))


def test_instances_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 8)
    groups = "instance_group [ { count: %d kind: KIND_CPU }, { count: %d kind: KIND_CPU } ]"
    counts = {(1, 1): 4, (2, 1): 2, (7, 1): 1, (9, 9): 1}
    assert {n: framework_backend.n_threads(config('backend: "x" ' + groups % n)) for n in counts} == counts
    assert usable_cores() >= 1


def test_a_file_larger_than_memory_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "1" / "model.pt"
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(1 << 42)  # of which nothing is written
    with pytest.raises(StatusError, match=rf"1/model.pt has {1 << 42} bytes, more than this machine's memory"):
        framework_backend.check_size(file)
    with pytest.raises(StatusError, match="more than this machine's memory"):
        framework_backend.check_size(file.parent)
    framework_backend.check_size(tmp_path / "1" / "model.pt", 1)


def test_a_folder_keeps_to_itself(tmp_path: Path) -> None:
    folder = tmp_path / "model.savedmodel"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"x")
    (folder / "variables" / "same").symlink_to("../saved_model.pb")
    framework_backend.check_size(folder)
    (folder / "variables" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(StatusError, match="secret is a link that leads out of the model's folder"):
        framework_backend.check_size(folder)


def test_whatever_a_framework_raises_is_an_answer() -> None:
    with (
        pytest.raises(StatusError, match="some framework error: KeyError"),
        framework_backend.framework_errors("some framework"),
    ):
        raise KeyError
    with pytest.raises(StatusError, match=r"^ours$"), framework_backend.framework_errors("some framework"):
        raise invalid("ours")


HELD = """backend: "sums" max_batch_size: 4 sequence_batching { state {
  input_name: "held" output_name: "held_on" data_type: TYPE_INT32 dims: [ 1 ] } }"""


class Sums(FrameworkBackend):
    file = "network.txt"

    def instance(self, given: InstanceContext) -> FrameworkModel:
        return Sum(given)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        kind = file.read_text()
        return (
            [TensorSignature(name, kind, (-1, 1)) for name in ("INPUT", "held")],
            [TensorSignature(name, kind, (-1, 1)) for name in ("OUTPUT", "held_on")],
        )


class Sum(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        self.check(*Sums().signatures(self.inner, given.file))

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        assert [i.name for i in self.inner.input] == ["INPUT", "held"]
        total = inputs["INPUT"] + inputs["held"]
        return {"OUTPUT": total, "held_on": total}


def test_a_network_is_completed_and_compared_with_what_clients_do_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its file, whose name is the backend's; its state goes in and comes out, and is no input of a client's."""
    monkeypatch.setitem(BACKENDS, "sums", Sums)

    def write(config: str, kind: str = "INT32") -> None:
        (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / "1" / "network.txt").write_text(kind)
        (tmp_path / "m" / "config.pbtxt").write_text(config)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            assert [i.name for i in model.config.input] == ["INPUT"]
            assert [o.name for o in model.config.output] == ["OUTPUT"]
            found = [await model.infer(part(model, 7, value, flags=int(not i))) for i, value in enumerate((3, 4, 5))]
            assert [answer.outputs["OUTPUT"].item() for answer in found] == [3, 7, 12]

    write(HELD)
    asyncio.run(run())
    write(HELD, "INT64")
    assert (
        "tensor 'held': the model expects data-type INT64 but the model configuration specifies" in refused(tmp_path)[0]
    )
    write(HELD + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }')
    (failed,) = refused(tmp_path)
    assert "execution accelerator 'openvino' of model 'm' is not supported" in failed


@pytest.mark.parametrize(
    ("backend", "package", "file"),
    [
        ("onnxruntime", "onnxruntime", "model.onnx"), ("sklearn", "sklearn", "model.skops"),
        ("sklearn", "skops.io", "model.skops"), ("xgboost", "xgboost", "xgboost.json"),
        ("fil", "xgboost", "xgboost.ubj"), ("openvino", "openvino", "model.xml"),
        ("tensorflow", "tensorflow", "model.savedmodel"), ("pytorch", "torch", "model.pt"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, package: str, file: str
) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "1" / file).write_bytes(b"")
    (tmp_path / "net" / "config.pbtxt").write_text(f'backend: "{backend}"')
    extra = type(create_backend(backend)).__module__.rpartition(".")[2]
    framework_backend.import_package.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    (failed,) = refused(tmp_path)
    assert f"backend '{extra}' needs a package that cannot be imported: " in failed
    assert f"pip install 'millrace[{extra}]'" in failed


def test_backends_that_are_not_run_here_say_what_is(tmp_path: Path) -> None:
    for name, config in {"llm": 'backend: "vllm"', "graph": 'platform: "tensorflow_graphdef"'}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.graphdef").write_bytes(b"")
        (tmp_path / name / "config.pbtxt").write_text(config)
    failed = refused(tmp_path)
    assert "backend vllm is not run here: vLLM wants a GPU, and a process and packages of its own" in failed[1]
    assert "platform 'tensorflow_graphdef' of model 'graph' is not supported: a graph says nothing of its" in failed[0]
