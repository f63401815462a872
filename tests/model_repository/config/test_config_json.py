"""/config: what protobuf's own writer makes of the same text, but 64-bit integers as numbers."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict

from millrace.model_repository.config.autocomplete import complete_config
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.message_fields import specs
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.serve.protocols.kserve.grpc.protobuf_messages import config_message, message

TEXTS = [
    "",
    """name: "simple" platform: "onnxruntime_onnx" max_batch_size: 8
    input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16, -1 ] optional: true reshape { shape: [ ] } }
    output { name: "OUTPUT0" data_type: TYPE_STRING dims: 16 label_filename: "l.txt" }
    instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" global: true count: 4 } } }
    version_policy { specific { versions: [ 1, 9223372036854775807 ] } }
    dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 3
      default_priority_level: 2 default_queue_policy { timeout_action: DELAY max_queue_size: 7 }
      priority_queue_policy { key: 1 value { allow_timeout_override: true } } }
    parameters { key: "a" value { string_value: "b" } } response_cache { enable: true }
    model_transaction_policy { decoupled: false } version_policy: { }""".replace("version_policy: { }", ""),
    """sequence_batching { max_sequence_idle_microseconds: 18446744073709551615
      direct { minimum_slot_utilization: 0.5 }
      control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
      state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: -1
        initial_state { data_type: TYPE_FP32 dims: 1 zero_data: true name: "z" } } }
    model_metrics { metric_control { metric_identifier { family: "f" }
      histogram_options { buckets: [ 1, inf, nan ] } } }
    model_warmup { name: "w" inputs { key: "i" value { dims: 2 random_data: true } } }""",
    """platform: "ensemble" ensemble_scheduling { step { model_name: "m" model_version: -1
      input_map { key: "a" value: "b" } output_map { key: "c" value: "d" } } }""",
]


def with_numbers(cls: type, told: dict[str, Any]) -> dict[str, Any]:
    """protobuf's JSON with its 64-bit integers, which it writes as strings, as numbers; by the declared types."""
    found = {}
    for name, value in told.items():
        spec = specs(cls)[name]
        one = spec.value_type if spec.kind == "map" else spec

        def changed(v: Any, one: Any = one) -> Any:
            if one.kind in ("int64", "uint64"):
                return int(v)
            return with_numbers(one.value_type, v) if one.kind == "message" else v

        many = {k: changed(v) for k, v in value.items()} if spec.kind == "map" else None
        found[name] = many if many is not None else [changed(v) for v in value] if spec.repeated else changed(value)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_json_is_protobufs(text: str) -> None:
    truth = MessageToDict(
        text_format.Parse(text, message("ModelConfig")()),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    read = read_config(text.encode(), Path("config.pbtxt"))
    assert not read.problems or all(p.level.value == "ignored" for p in read.problems)
    ours = config_json(read.config)
    assert ours == with_numbers(ModelConfig, truth)


@pytest.mark.parametrize("text", TEXTS)
def test_messages_are_protobufs(text: str) -> None:
    """What `ModelConfig` answers over gRPC: the very bytes that protobuf makes of the text."""
    truth = text_format.Parse(text, message("ModelConfig")())
    ours = config_message(read_config(text.encode(), Path("config.pbtxt")).config)
    assert ours.SerializeToString(deterministic=True) == truth.SerializeToString(deterministic=True)


def test_defaults_and_numbers_as_triton_has_them() -> None:
    """Of server#5319: `'dims': [238], 'format': 'FORMAT_NONE', ..., 'optional': False`."""
    text = b'backend: "python" input { name: "i" data_type: TYPE_FP32 dims: 238 }'
    config, _ = complete_config(read_config(text, Path("c")).config, "m", ())
    told = config_json(config)
    assert told["input"] == [
        {"name": "i", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [238], "is_shape_tensor": False,
         "allow_ragged_batch": False, "optional": False, "is_non_linear_format_io": False}
    ]  # fmt: skip
    assert told["version_policy"] == {"latest": {"num_versions": 1}}
    assert list(told)[:6] == ["name", "platform", "backend", "runtime", "version_policy", "max_batch_size"]
    (group,) = told["instance_group"]
    assert (group["name"], group["kind"], group["count"], group["gpus"]) == ("m", "KIND_CPU", 1, [])
