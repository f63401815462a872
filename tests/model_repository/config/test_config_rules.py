"""Triton's rules of a configuration, each with its words and the place that they are about.

The words are those of `model_config_utils.cc` in Triton's core (2026): people search for them.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from millrace.model_repository.config.autocomplete import backend_violation, complete_config
from millrace.model_repository.config.config_rules import rule_violations, unsupported_settings
from millrace.model_repository.config.data_files_check import data_violations
from millrace.model_repository.config.ensemble_rules import ensemble_violations
from millrace.model_repository.config.enums import DataType, InstanceKind
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import (
    BatchOutput,  # fmt: skip
    EnsembleScheduling,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Reshape,
    Step,
)
from millrace.model_repository.config.pbtxt_binder import ParsedConfig, read_config
from millrace.model_repository.config.problems import Level
from tests.model_repository.config.test_pbtxt_parser import Drawn
from tests.support.drawn import SEEDS, examples


def said(text: str, name: str = "m", files: tuple[str, ...] = ("model.py",)) -> list[tuple[str, str]]:
    """(line:column, what), in the order of the rules."""
    read = read_config(text.encode(), Path("config.pbtxt"))
    assert all(p.level is Level.IGNORED for p in read.problems), read.problems
    config, _ = complete_config(read.config, name, files)
    backend = backend_violation(config)
    found = [
        *([backend] if backend else []),
        *ensemble_violations(config),
        *rule_violations(config),
        *data_violations(config),
        *unsupported_settings(config),
    ]
    return [(at(read, b.path), b.what) for b in found]


def at(read: ParsedConfig, path: tuple[str | int, ...]) -> str:
    place = read.place(path)
    return f"{place.line}:{place.column}" if place else ""


def cases() -> list[tuple[str, str]]:
    """(a configuration with @ where the problem is, what is said of it)"""
    text = Path(__file__).with_name("rules.txt").read_text()
    found = [case.strip("\n").rsplit("\n-> ", 1) for case in text.split("\n\n")]
    return [(written, what) for written, what in found]


@pytest.mark.parametrize(("written", "what"), cases(), ids=[what for _, what in cases()])
def test_words_and_places(written: str, what: str) -> None:
    before = written[: written.index("@")].split("\n")
    assert said(written.replace("@", ""))[0] == (f"{len(before)}:{len(before[-1]) + 1}", what)


@pytest.mark.parametrize(
    "text",
    ["dynamic_batching { priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 2 } }",
     "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 1, 4 ] }",
     "sequence_batching { direct { minimum_slot_utilization: 1 } }", "sequence_batching { direct {} }",
     "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 }",
     "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
     "input { name: 'x' data_type: TYPE_INT8 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] } }",
     "max_batch_size: 1 input { name: 'x' data_type: TYPE_INT8 dims: 1 reshape {} }",
     "input { name: 'x' data_type: TYPE_INT8 dims: [ -1, 2, 3 ] format: FORMAT_NHWC }",
     "response_cache { enable: true }", "instance_group { kind: KIND_MODEL count: 3 }",
     "sequence_batching { state { input_name: 'a' output_name: 'b' data_type: TYPE_INT8 dims: -1 "
     "initial_state { name: 'z' data_type: TYPE_INT8 dims: 7 zero_data: true } } iterative_sequence: false }",
     "model_warmup { batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }",
     "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: -1 } } }"],
)  # fmt: skip
def test_what_just_holds(text: str) -> None:
    assert said(text) == []


STEP = "step { model_name: '%s' input_map { key: 'i' value: '%s' } output_map { key: 'o' value: '%s' } }\n"
FP32 = "{ name: '%s' data_type: TYPE_FP32 dims: 4 }\n"


def ensemble(inputs: str, outputs: str, *steps: tuple[str, str, str], more: str = "") -> list[str]:
    tensors = "".join("input " + FP32 % t for t in inputs) + "".join("output " + FP32 % t for t in outputs)
    scheduling = "ensemble_scheduling {" + "".join(STEP % s for s in steps) + "}"
    return [what for _, what in said("platform: 'ensemble' " + tensors + scheduling + more)]


def test_ensembles() -> None:
    assert ensemble("a", "c", ("p", "a", "b"), ("q", "b", "c")) == []
    assert ensemble("a", "c", ("q", "b", "c"), ("p", "a", "b")) == [], "the order of steps does not matter"
    assert ensemble("a", "bc", ("p", "a", "b"), ("q", "b", "c")) == [], "an output may be used, too"
    assert ensemble("a", "c", ("p", "a", "b"), ("q", "a", "c")) == ["ensemble tensor 'b' is unused in ensemble 'm'"]
    assert ensemble("ax", "c", ("p", "a", "c")) == ["ensemble input 'x' for ensemble m is not used"]
    assert ensemble("a", "cd", ("p", "a", "c")) == ["ensemble output 'd' for ensemble m is not used"]
    missing = "output 'c' for ensemble 'm' is not written: at least one of its depending tensors, 'z', is not connected"
    assert ensemble("a", "cy", ("p", "z", "b"), ("q", "b", "c"), ("r", "a", "y")) == [missing]
    ring = "output 'c' for ensemble 'm' is not written: at least one of its depending tensors, 'b', is not connected"
    assert ensemble("a", "cy", ("p", "c", "b"), ("q", "b", "c"), ("r", "a", "y")) == [ring]
    twice = "ensemble tensor 'b' can appear in an output map only once for ensemble 'm' step 1"
    assert ensemble("a", "b", ("p", "a", "b"), ("q", "a", "b")) == [twice]
    grouped = ensemble("a", "b", ("p", "a", "b"), more="instance_group { count: 1 }")
    assert grouped == ["instance group should not be specified for ensemble 'm'"]
    assert ensemble("a", "b", ("", "a", "b")) == ["must specify 'model_name' in step 0 of ensemble 'm'"]


MANY = 20_000


def chain(ends: tuple[int, int], order: range) -> ModelConfig:
    steps = [
        replace(empty(Step), model_name="m", input_map={"i": str(i)}, output_map={"o": str((i + 1) % MANY)})
        for i in order
    ]
    first, last = (str(end) for end in ends)
    tensor: dict[str, Any] = {"data_type": DataType.TYPE_FP32, "dims": (1,)}
    return replace(
        empty(ModelConfig), name="m", platform="ensemble", input=(replace(empty(ModelInput), name=first, **tensor),),
        output=(replace(empty(ModelOutput), name=last, **tensor),),
        ensemble_scheduling=EnsembleScheduling(step=tuple(steps), max_inflight_requests=0),
    )  # fmt: skip


def test_costs_grow_with_the_file() -> None:
    """Not with its square."""
    shape = replace(empty(ModelInput), name="x", data_type=DataType.TYPE_FP32, dims=((1 << 63) - 1,) * 100_000)
    shaped = replace(empty(ModelConfig), input=(replace(shape, reshape=Reshape(shape=(3,) * 100_000)),))
    names = tuple(map(str, range(2 * MANY)))
    targets = replace(empty(ModelConfig), batch_output=(replace(empty(BatchOutput), target_name=names),))
    started = time.process_time()
    assert list(rule_violations(shaped)) == [], "sizes from 2**64 on are not told apart"
    assert len(list(rule_violations(targets))) == 2 * MANY + 1
    assert list(ensemble_violations(chain((0, MANY - 1), range(MANY - 2, -1, -1)))) == [], "the last step stands first"
    circle = list(ensemble_violations(chain((MANY, 0), range(MANY))))[-1]
    assert "is not written: at least one of its depending tensors" in circle.what
    assert time.process_time() - started < 3


@settings(max_examples=examples(150))
@given(SEEDS)
def test_rules_bear_whatever_can_be_read(seed: int) -> None:
    """Every problem has its place in the file, or is of a file that says nothing of it."""
    text = Drawn(seed).message(ModelConfig)
    read = read_config(text.encode(), Path("c"))
    config, _ = complete_config(read.config, "m", ())
    for broken in (*ensemble_violations(config), *rule_violations(config)):
        assert broken.what and broken.expected and broken.fix
        assert read.place(broken.path) is not None, (broken, text)


@pytest.mark.parametrize(
    ("text", "name", "files", "backend", "platform", "file"),
    [
        ("", "m", ("model.onnx",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("", "m", ("model.py",), "python", "", "model.py"),
        ("", "m", ("model.py", "model.onnx"), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("", "m", ("model.pt",), "pytorch", "pytorch_libtorch", "model.pt"),
        ("", "m", ("model.pt2",), "pytorch", "torch_aoti", "model.pt2"),
        ("", "m", ("model.xml", "model.bin"), "openvino", "", "model.xml"),
        ("", "m", ("model.savedmodel",), "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
        ("", "m.identity", (), "identity", "", "model.identity"),
        ("platform: 'onnxruntime_onnx'", "m", (), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("platform: 'libtorch'", "m", (), "pytorch", "pytorch_libtorch", "model.pt"),
        ("backend: 'tensorflow'", "m", ("model.graphdef",), "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ("default_model_filename: 'model.py'", "m", (), "python", "", "model.py"),
        ("backend: 'python' default_model_filename: 'a.py'", "m", ("model.onnx",), "python", "", "a.py"),
        ("backend: 'mine'", "m", ("model.onnx",), "mine", "", ""),
        ("", "m", ("weights.bin",), "", "", ""),
    ],
)  # fmt: skip
def test_completion(text: str, name: str, files: tuple[str, ...], backend: str, platform: str, file: str) -> None:
    config, _ = complete_config(read_config(text.encode(), Path("c")).config, name, files)
    assert (config.name, config.backend, config.platform, config.default_model_filename) == (
        name,
        backend,
        platform,
        file,
    )
    assert config.version_policy and config.version_policy.latest and config.version_policy.latest.num_versions == 1
    (group,) = config.instance_group
    count = 2 if backend in ("onnxruntime", "tensorflow") else 1
    assert (group.name, group.kind, group.count) == (name, InstanceKind.KIND_CPU, count)


def test_defaults_of_batchers() -> None:
    text = "max_batch_size: 8 sequence_batching { oldest {} }"
    config, _ = complete_config(read_config(text.encode(), Path("c")).config, "m", ())
    batching = config.sequence_batching
    assert batching and batching.oldest and batching.oldest.preferred_batch_size == (8,)
    assert batching.max_sequence_idle_microseconds == 1_000_000
    text = "max_batch_size: 8 dynamic_batching {} instance_group [ {}, { gpus: 1 } ]"
    config, _ = complete_config(read_config(text.encode(), Path("c")).config, "m", ())
    assert config.dynamic_batching and config.dynamic_batching.preferred_batch_size == (8,)
    assert [(g.name, g.gpus) for g in config.instance_group] == [("m_0", ()), ("m_1", ())]


def test_a_step_without_a_version_is_the_latest() -> None:
    """As clients are told it, who ask for the steps by their versions: there is no version 0."""
    steps = 'step { model_name: "a" } step { model_name: "b" model_version: 3 }'
    text = f'platform: "ensemble" ensemble_scheduling {{ {steps} }}'
    config, _ = complete_config(read_config(text.encode(), Path("c")).config, "m", ())
    assert config.ensemble_scheduling and [s.model_version for s in config.ensemble_scheduling.step] == [-1, 3]


def test_instances_are_threads_and_have_a_bound() -> None:
    config = 'backend: "identity" instance_group { count: %d }'
    assert not any("count" in what for _, what in said(config % 1024))
    assert any("has count 1025" in what for _, what in said(config % 1025))
