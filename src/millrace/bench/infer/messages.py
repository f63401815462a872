"""KServe's gRPC messages, as classes of the protobuf library: made from a table, in a pool of their own.

Names and numbers of fields are the protocol's (package `inference`); of Triton's `ModelConfig`, what is read here. In
protobuf's common pool they would clash with those of `tritonclient`, which a program may import, too.
"""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"/{PACKAGE}.GRPCInferenceService/"
# Message: fields, each `type name number`; * is repeated, `map` a map from string to InferParameter. A message whose
# name has a dot belongs into the one before it. Enumerations are numbers on the wire, and so they are here.
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
ModelInferRequest: string model_name 1, string model_version 2, string id 3, map parameters 4, \
*InferInputTensor inputs 5, *InferRequestedOutputTensor outputs 6, *bytes raw_input_contents 7
ModelInferRequest.InferInputTensor: string name 1, string datatype 2, *int64 shape 3, map parameters 4, \
InferTensorContents contents 5
ModelInferRequest.InferRequestedOutputTensor: string name 1, map parameters 2
ModelInferResponse: string model_name 1, string model_version 2, string id 3, map parameters 4, \
*InferOutputTensor outputs 5, *bytes raw_output_contents 6
ModelInferResponse.InferOutputTensor: string name 1, string datatype 2, *int64 shape 3, map parameters 4, \
InferTensorContents contents 5
ModelConfigRequest: string name 1, string version 2
ModelConfigResponse: ModelConfig config 1
ModelConfig: string name 1, string platform 2, int32 max_batch_size 4, *ModelInput input 5, *ModelOutput output 6, \
*ModelInstanceGroup instance_group 7, string backend 17
ModelInput: string name 1, int32 data_type 2, *int64 dims 4
ModelOutput: string name 1, int32 data_type 2, *int64 dims 3
ModelInstanceGroup: string name 1, int32 count 2, *int32 gpus 3, int32 kind 4
ModelStatisticsRequest: string name 1, string version 2
ModelStatisticsResponse: *ModelStatistics model_stats 1
ModelStatistics: string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, \
uint64 execution_count 5, InferStatistics inference_stats 6
InferStatistics: StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3, \
StatisticDuration compute_input 4, StatisticDuration compute_infer 5, StatisticDuration compute_output 6, \
StatisticDuration cache_hit 7, StatisticDuration cache_miss 8
StatisticDuration: uint64 count 1, uint64 ns 2
"""
_ONE_OF = ("InferParameter",)  # of whose fields one is set
KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
CONFIG_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
)  # fmt: skip
_Field = descriptor_pb2.FieldDescriptorProto


@cache
def message(name: str) -> Any:
    """The class of a message, by its name in the table."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="millrace/kserve.proto", package=PACKAGE, syntax="proto3")
    lines = [line.partition(":") for line in _TABLE.strip().split("\n")]
    names = {name for name, _, _ in lines}
    for name, _, fields in lines:
        outer, dot, inner = name.partition(".")
        if dot:
            (parent,) = (m for m in file.message_type if m.name == outer)
            found = parent.nested_type.add(name=inner)
        else:
            found = file.message_type.add(name=name)
        if name in _ONE_OF:
            found.oneof_decl.add(name="parameter_choice")
        for text in filter(None, fields.strip().split(", ")):
            _add(found, name, text, names)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add(to: Any, name: str, text: str, names: set[str]) -> None:
    """One field, as the table writes it."""
    kind, field, number = text.strip().split(" ")
    made = to.field.add(name=field, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("*") or kind == "map":
        made.label, kind = _Field.LABEL_REPEATED, kind.removeprefix("*")
    if name in _ONE_OF:
        made.oneof_index = 0
    if kind == "map":
        entry = to.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _add(entry, "", "InferParameter value 2", names)
        made.type, made.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{name}.ParametersEntry"
    elif kind in names or f"{name}.{kind}" in names:
        inner = f"{name}.{kind}" if f"{name}.{kind}" in names else kind
        made.type, made.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{inner}"
    else:
        made.type = getattr(_Field, f"TYPE_{kind.upper()}")
