"""KServe's gRPC messages as protobuf classes, created from a table in a separate descriptor pool.

Names and numbers of fields are the protocol's (package `inference`); those of a model's configuration are declared in
`model_repository/config/model_config.py`. In protobuf's default pool they would clash with those of `tritonclient`,
which a program may import, too.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig

PACKAGE = "inference"
SERVICE = f"/{PACKAGE}.GRPCInferenceService/"
# Message: fields, each `type name number`; * is repeated, map:T a map from string to T. A message whose name has a dot
# belongs into the one before it. `grpc.health.v1` is another package, of which no byte on the wire tells.
_TABLE = """
ServerLiveRequest:
ServerLiveResponse: bool live 1
ServerReadyRequest:
ServerReadyResponse: bool ready 1
ModelReadyRequest: string name 1, string version 2
ModelReadyResponse: bool ready 1
ServerMetadataRequest:
ServerMetadataResponse: string name 1, string version 2, *string extensions 3
ModelMetadataRequest: string name 1, string version 2
ModelMetadataResponse: string name 1, *string versions 2, string platform 3, *TensorMetadata inputs 4, \
*TensorMetadata outputs 5
ModelMetadataResponse.TensorMetadata: string name 1, string datatype 2, *int64 shape 3
InferParameter: bool bool_param 1, int64 int64_param 2, string string_param 3, double double_param 4, \
uint64 uint64_param 5
InferTensorContents: *bool bool_contents 1, *int32 int_contents 2, *int64 int64_contents 3, *uint32 uint_contents 4, \
*uint64 uint64_contents 5, *float fp32_contents 6, *double fp64_contents 7, *bytes bytes_contents 8
ModelInferRequest: string model_name 1, string model_version 2, string id 3, map:InferParameter parameters 4, \
*InferInputTensor inputs 5, *InferRequestedOutputTensor outputs 6, *bytes raw_input_contents 7
ModelInferRequest.InferInputTensor: string name 1, string datatype 2, *int64 shape 3, \
map:InferParameter parameters 4, InferTensorContents contents 5
ModelInferRequest.InferRequestedOutputTensor: string name 1, map:InferParameter parameters 2
ModelInferResponse: string model_name 1, string model_version 2, string id 3, map:InferParameter parameters 4, \
*InferOutputTensor outputs 5, *bytes raw_output_contents 6
ModelInferResponse.InferOutputTensor: string name 1, string datatype 2, *int64 shape 3, \
map:InferParameter parameters 4, InferTensorContents contents 5
ModelStreamInferResponse: string error_message 1, ModelInferResponse infer_response 2
ModelConfigRequest: string name 1, string version 2
ModelConfigResponse: ModelConfig config 1
ModelStatisticsRequest: string name 1, string version 2
ModelStatisticsResponse: *ModelStatistics model_stats 1
ModelStatistics: string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, \
uint64 execution_count 5, InferStatistics inference_stats 6, *InferBatchStatistics batch_stats 7, \
*MemoryUsage memory_usage 8, map:InferResponseStatistics response_stats 9
InferStatistics: StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3, \
StatisticDuration compute_input 4, StatisticDuration compute_infer 5, StatisticDuration compute_output 6, \
StatisticDuration cache_hit 7, StatisticDuration cache_miss 8
InferBatchStatistics: uint64 batch_size 1, StatisticDuration compute_input 2, StatisticDuration compute_infer 3, \
StatisticDuration compute_output 4
InferResponseStatistics: StatisticDuration compute_infer 1, StatisticDuration compute_output 2, \
StatisticDuration success 3, StatisticDuration fail 4, StatisticDuration empty_response 5, StatisticDuration cancel 6
MemoryUsage: string type 1, int64 id 2, uint64 byte_size 3
StatisticDuration: uint64 count 1, uint64 ns 2
ModelRepositoryParameter: bool bool_param 1, int64 int64_param 2, string string_param 3, bytes bytes_param 4
RepositoryIndexRequest: string repository_name 1, bool ready 2
RepositoryIndexResponse: *ModelIndex models 1
RepositoryIndexResponse.ModelIndex: string name 1, string version 2, string state 3, string reason 4
RepositoryModelLoadRequest: string repository_name 1, string model_name 2, map:ModelRepositoryParameter parameters 3
RepositoryModelLoadResponse:
RepositoryModelUnloadRequest: string repository_name 1, string model_name 2, map:ModelRepositoryParameter parameters 3
RepositoryModelUnloadResponse:
SystemSharedMemoryStatusRequest: string name 1
SystemSharedMemoryStatusResponse: map:SystemSharedMemoryStatusResponse.RegionStatus regions 1
SystemSharedMemoryStatusResponse.RegionStatus: string name 1, string key 2, uint64 offset 3, uint64 byte_size 4
SystemSharedMemoryRegisterRequest: string name 1, string key 2, uint64 offset 3, uint64 byte_size 4
SystemSharedMemoryRegisterResponse:
SystemSharedMemoryUnregisterRequest: string name 1
SystemSharedMemoryUnregisterResponse:
CudaSharedMemoryStatusRequest: string name 1
CudaSharedMemoryStatusResponse: map:CudaSharedMemoryStatusResponse.RegionStatus regions 1
CudaSharedMemoryStatusResponse.RegionStatus: string name 1, uint64 device_id 2, uint64 byte_size 3
CudaSharedMemoryRegisterRequest: string name 1, bytes raw_handle 2, int64 device_id 3, uint64 byte_size 4
CudaSharedMemoryRegisterResponse:
CudaSharedMemoryUnregisterRequest: string name 1
CudaSharedMemoryUnregisterResponse:
TraceSettingRequest: map:TraceSettingRequest.SettingValue settings 1, string model_name 2
TraceSettingRequest.SettingValue: *string value 1
TraceSettingResponse: map:TraceSettingResponse.SettingValue settings 1
TraceSettingResponse.SettingValue: *string value 1
LogSettingsRequest: map:LogSettingsRequest.SettingValue settings 1
LogSettingsRequest.SettingValue: bool bool_param 1, uint32 uint32_param 2, string string_param 3
LogSettingsResponse: map:LogSettingsResponse.SettingValue settings 1
LogSettingsResponse.SettingValue: bool bool_param 1, uint32 uint32_param 2, string string_param 3
HealthCheckRequest: string service 1
HealthCheckResponse: int32 status 1
"""
# Messages with one set field.
_ONE_OF = ("InferParameter", "ModelRepositoryParameter", "LogSettingsRequest.SettingValue",
           "LogSettingsResponse.SettingValue")  # fmt: skip
CONTENTS = {  # the fields of values that are not raw; FP16 and BF16 have none
    "BOOL": "bool_contents", "INT64": "int64_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
    "FP64": "fp64_contents", "BYTES": "bytes_contents", **dict.fromkeys(("INT32", "INT16", "INT8"), "int_contents"),
    **dict.fromkeys(("UINT32", "UINT16", "UINT8"), "uint_contents"),
}  # fmt: skip
_Field = descriptor_pb2.FieldDescriptorProto


@cache
def message(name: str) -> Any:
    """Return the class of a message, by its name in the table or in `model_config.py`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def field_numbers(name: str) -> Mapping[str, int]:
    """Return the field numbers of a message by name."""
    return {field.name: field.number for field in message(name).DESCRIPTOR.fields}


def build_message(name: str, fields: Mapping[str, Any]) -> Any:
    """Create a message. fields: with dictionaries for inner messages, which protobuf takes in maps only since 6.30"""
    proto = message(name)()
    _fill(proto, fields)
    return proto


def _fill(target: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        inner = getattr(target, name)
        if hasattr(inner, "append"):
            for one in value:
                if isinstance(one, Mapping):
                    _fill(inner.add(), one)
                else:
                    inner.append(one)
        elif hasattr(value, "SerializeToString"):
            inner.CopyFrom(value)
        elif hasattr(inner, "SetInParent"):
            inner.SetInParent()
            _fill(inner, value)
        elif isinstance(value, Mapping):
            _fill_map(inner, value)
        else:
            setattr(target, name, value)


def _fill_map(target: Any, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _fill(target[key], value)
        else:
            target[key] = value


def config_message(config: ModelConfig) -> Any:
    """Return a model's configuration as a message. config: completed"""
    return build_message("ModelConfig", _plain(config))


@cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="millrace/kserve.proto", package=PACKAGE, syntax="proto3")
    lines = [line.partition(":") for line in _TABLE.strip().split("\n")]
    configuration = _messages(ModelConfig, {})
    names = {name for name, _, _ in lines} | set(configuration)
    for name, _, fields in lines:
        outer, dot, inner = name.partition(".")
        if dot:
            (parent,) = (m for m in file.message_type if m.name == outer)
            message_type = parent.nested_type.add(name=inner)
        else:
            message_type = file.message_type.add(name=name)
        if name in _ONE_OF:
            message_type.oneof_decl.add(name="parameter_choice")
        for text in filter(None, fields.strip().split(", ")):
            _add(message_type, name, text, names)
    for name, cls in configuration.items():
        _declare(file.message_type.add(name=name), name, cls)
    for enum in sorted(set(_enums(configuration)), key=lambda e: e.__name__):
        scope = file.message_type.add(name=f"Scope{enum.__name__}")  # of its own: in it names of values are unique
        enum_type = scope.enum_type.add(name=enum.__name__)
        for value in enum:
            enum_type.value.add(name=value.name, number=value.value)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add(target: Any, name: str, text: str, names: set[str]) -> None:
    """Add a field, given as in the table."""
    kind, field_name, number = text.strip().split(" ")
    field = target.field.add(name=field_name, number=int(number), label=_Field.LABEL_OPTIONAL)
    kind, _, of_map = kind.partition(":")
    if kind.startswith("*") or of_map:
        field.label, kind = _Field.LABEL_REPEATED, kind.removeprefix("*")
    if name in _ONE_OF:
        field.oneof_index = 0
    if of_map:
        entry = _entry(target, name, field)
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _add(entry, "", f"{of_map} value 2", names)
    elif kind in names or f"{name}.{kind}" in names:
        inner = f"{name}.{kind}" if f"{name}.{kind}" in names else kind
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{inner}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _entry(target: Any, owner: str, field: Any) -> Any:
    """Add the message of a map's entries, named as protobuf does."""
    name = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{owner}.{name}"
    entry = target.nested_type.add(name=name)
    entry.options.map_entry = True
    return entry


# ---------------------------------------------------------------------- a model's configuration


def _messages(cls: type, by_name: dict[str, type]) -> dict[str, type]:
    """Collect every message that `cls` reaches, by name."""
    if cls.__name__ not in by_name:
        by_name[cls.__name__] = cls
        for spec in specs(cls).values():
            for inner in (spec, *([spec.value_type] if spec.kind == "map" else [])):
                if inner.kind == "message":
                    _messages(inner.value_type, by_name)
    return by_name


def _enums(configuration: dict[str, type]) -> Iterator[type[IntEnum]]:
    for cls in configuration.values():
        yield from (spec.value_type for spec in specs(cls).values() if spec.kind == "enum")


def _declare(target: Any, name: str, cls: type) -> None:
    oneofs: list[str] = []
    for spec in specs(cls).values():
        _add_declared(target, name, spec, oneofs)
    for oneof in oneofs:
        target.oneof_decl.add(name=oneof)


def _add_declared(target: Any, owner: str, spec: FieldSpec, oneofs: list[str]) -> None:
    field = target.field.add(name=spec.name, number=spec.number, label=_Field.LABEL_OPTIONAL)
    if spec.repeated or spec.kind == "map":
        field.label = _Field.LABEL_REPEATED
    if spec.oneof:
        if spec.oneof not in oneofs:
            oneofs.append(spec.oneof)
        field.oneof_index = oneofs.index(spec.oneof)
    if spec.kind == "map":
        assert spec.key is not None, spec.name
        entry = _entry(target, owner, field)
        _add_declared(entry, owner, spec.key, [])
        _add_declared(entry, owner, spec.value_type, [])
    elif spec.kind == "message":
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{spec.value_type.__name__}"
    elif spec.kind == "enum":
        field.type, field.type_name = (
            _Field.TYPE_ENUM,
            f".{PACKAGE}.Scope{spec.value_type.__name__}.{spec.value_type.__name__}",
        )
    else:
        field.type = getattr(_Field, f"TYPE_{spec.kind.upper()}")


def _plain(config: Any) -> dict[str, Any]:
    """Return the fields of a declared message that differ from their defaults, for `build_message`."""
    cls: type = type(config)
    values = ((spec, getattr(config, spec.attribute)) for spec in specs(cls).values())
    return {spec.name: _value(spec, value) for spec, value in values if value != spec.default}


def _value(spec: FieldSpec, value: Any) -> Any:
    if spec.kind == "map":
        return {key: _value(spec.value_type, one) for key, one in value.items()}
    if spec.kind != "message":
        return list(value) if spec.repeated else value
    return [_plain(one) for one in value] if spec.repeated else _plain(value)
