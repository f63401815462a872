"""Inference over gRPC: conversion of a ModelInferRequest into a request, and of a response into a ModelInferResponse.

Errors have Triton's texts. Data is raw for all inputs or in typed fields for all; outputs are always raw.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.python_backend.stub.bytes_tensors import join_in_pieces
from millrace.model_repository.request.concatenation import concatenate
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import DeferredData, RawInput, check_shape, format_shape
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES
from millrace.protobuf import varint
from millrace.serve.protocols.kserve.grpc.message_scan import PackedField, SplitInferRequest, contents_pieces
from millrace.serve.protocols.kserve.grpc.packed_numbers import unpack_numbers
from millrace.serve.protocols.kserve.grpc.protobuf_messages import CONTENTS, message
from millrace.serve.protocols.kserve.http.infer_response import requested_outputs
from millrace.serve.protocols.kserve.request_fields import output_names, take_parameter
from millrace.serve.protocols.kserve.shared_memory import RegionPlace, TenantRegions, require_shared_memory

RAW_OUTPUT = bytes((6 << 3 | 2,))  # a field of ModelInferResponse, its last
EMPTY_FINAL, FINAL = "triton_enable_empty_final_response", "triton_final_response"
_KIND_OF = {"bool_contents": "BOOL", "int_contents": "INT32", "int64_contents": "INT64", "uint_contents": "UINT32",
            "uint64_contents": "UINT64", "fp32_contents": "FP32", "fp64_contents": "FP64",
            "bytes_contents": BYTES}  # fmt: skip
_PIECE = 1 << 16  # values
_EXPECTED = {
    "id": "int64_param or string_param", "boolean": "bool_param", "count": "int64_param or uint64_param",
    "any": "int64_param, bool_param, string_param, or double_param",
}  # fmt: skip


@dataclass(slots=True)
class GrpcOutputOptions:
    """How outputs are written. n_classes: by output, if its classes are requested; shared: places in shared memory

    inputs: places of inputs in shared memory, whose regions stay until the request is over
    empty_final: the end is reported even if it brings no response
    """

    n_classes: dict[str, int] = field(default_factory=dict)
    shared: dict[str, RegionPlace] = field(default_factory=dict)
    inputs: list[RegionPlace] = field(default_factory=list)
    empty_final: bool = False


def read_infer(
    proto: Any, model: Model, shared: TenantRegions | None = None, cut: SplitInferRequest | None = None
) -> tuple[InferRequest, GrpcOutputOptions]:
    """Return the request and the output options of a ModelInferRequest.

    shared: None if clients' shared memory is not read. cut: the tensor data of a large message, split off before
    raises StatusError
    """
    request, output_options = InferRequest({}, request_id=proto.id), GrpcOutputOptions()
    for key, value in parameter_values(proto.parameters):
        if key == EMPTY_FINAL:
            if not isinstance(value, bool):
                raise _wrong(key, "boolean")
            output_options.empty_final = value
        elif key.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        else:
            take_parameter(request, key, value, _wrong)
    request.outputs = output_names(output.name for output in proto.outputs)
    for output in proto.outputs:
        if output.parameters:
            _take_output(output, output_options, shared)
    model.checker.attach_inputs(request, list(_raw_inputs(proto, model.name, shared, cut, output_options.inputs)))
    return request, output_options


def parameter_values(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of parameters; None for one without a value."""
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        yield key, None if kind is None else getattr(value, kind)


def _wrong(key: str, expected: str) -> StatusError:
    if expected == "natural":
        return invalid(f"invalid value for '{key}', expected value >= 0.")
    return invalid(f"invalid value type for '{key}' parameter, expected {_EXPECTED[expected]}.")


def _place(tensor: Any, shared: TenantRegions | None) -> RegionPlace | None:
    """Return the place of an input or output in shared memory; None if it is not there. raises StatusError"""
    parameters = {key: value for key, value in parameter_values(tensor.parameters) if key.startswith("shared_memory_")}
    if not parameters:
        return None
    regions = require_shared_memory(shared)
    region, offset, size = (parameters.get(f"shared_memory_{k}", 0) for k in ("region", "offset", "byte_size"))
    for key, value, kind in (
        ("region", region, "string_param"), ("offset", offset, "int64_param"), ("byte_size", size, "int64_param")
    ):  # fmt: skip
        if not isinstance(value, str if kind == "string_param" else int) or isinstance(value, bool):
            raise invalid(
                f"invalid value type for 'shared_memory_{key}' parameter for input '{tensor.name}', expected {kind}."
            )
    return regions.place(region, offset, size)


def _take_output(output: Any, output_options: GrpcOutputOptions, shared: TenantRegions | None) -> None:
    if (place := _place(output, shared)) is not None:
        output_options.shared[output.name] = place
    for key, value in parameter_values(output.parameters):
        if key == "classification":
            if isinstance(value, bool) or not isinstance(value, int):
                raise invalid("invalid value type for 'classification' parameter, expected int64_param")
            if value < 0:
                raise invalid("invalid value for 'classification' parameter, expected >= 0")
            output_options.n_classes[output.name] = value


def _raw_inputs(
    proto: Any, model: str, shared: TenantRegions | None, cut: SplitInferRequest | None, places: list[RegionPlace]
) -> Iterator[RawInput]:
    n_raw = shared_bytes = 0
    raws: Sequence[bytes | memoryview] = proto.raw_input_contents if cut is None else cut.raw_contents
    for i, tensor in enumerate(proto.inputs):
        place = _place(tensor, shared) if tensor.parameters else None
        if tensor.datatype not in DTYPES:
            raise invalid(f"invalid datatype for input {tensor.name}")
        shape = tuple(tensor.shape)
        if shape and min(shape) < 0:
            what = f"shape {format_shape(shape)} contains one or more invalid dimensions"
            raise invalid(f"invalid shape for input '{tensor.name}': {what}")
        check_shape(tensor.name, tensor.datatype, shape)
        data: bytes | memoryview | DeferredData
        if place is not None:
            if tensor.HasField("contents"):
                what = "unexpected 'contents' in request when using shared memory for input tensor"
                raise invalid(f"{what} '{tensor.name}' for model '{model}'")
            places.append(place)
            shared_bytes += place.byte_size
            require_shared_memory(shared).check_total(shared_bytes)
            data = DeferredData(place.read, place.byte_size)
        elif tensor.HasField("contents"):
            if raws:
                what = "contents field must not be specified when using raw_input_contents for"
                raise invalid(f"{what} '{tensor.name}' for model '{model}'")
            data = _typed_data(tensor, model, cut.contents.get(i, ()) if cut is not None else ())
        elif n_raw < len(raws):
            data, n_raw = raws[n_raw], n_raw + 1
        else:
            what = f"unable to find data for input tensor '{tensor.name}' for model '{model}' in request."
            raise invalid(what)
        yield RawInput(
            tensor.name, tensor.datatype, shape, data if isinstance(data, DeferredData) else memoryview(data)
        )
    if n_raw < len(raws):
        raise invalid(f"unexpected additional input data for model '{model}'")


def _typed_data(tensor: Any, model: str, cut: Sequence[memoryview]) -> bytes:
    """Return the typed fields of an input as raw data. cut: the fields of a large one. raises StatusError"""
    what = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}'"
    parts, kinds = list[bytes](), set[str]()
    for fields in (_fields(tensor.contents), *_decode_contents(cut)):
        kinds.update(fields)
        if len(kinds) > 1:
            raise invalid(f"{what}, binary data was already supplied.")
        for name, values in fields.items():
            if name != CONTENTS.get(tensor.datatype):
                raise invalid(f"{what} of type '{_KIND_OF[name]}', expected datatype '{tensor.datatype}'")
            parts += _raw_pieces(tensor.datatype, name, values)
    return concatenate(parts)


def _fields(contents: Any) -> dict[str, Any]:
    """Return the fields of an InferTensorContents that have values."""
    return {spec.name: values for spec, values in contents.ListFields()}


def _decode_contents(cut: Sequence[memoryview]) -> Iterator[dict[str, Any]]:
    """Yield the fields of contents, in pieces. raises StatusError"""
    for contents in cut:
        for piece in contents_pieces(contents):
            if isinstance(piece, PackedField):
                if (values := unpack_numbers(piece.data, np.dtype(DTYPES[_KIND_OF[piece.field]]))) is None:
                    raise _parse_error(f"{piece.field} ends within a number, or has one of more than 10 bytes")
                yield {piece.field: values}
                continue
            try:
                yield _fields(message("InferTensorContents").FromString(piece))
            except DecodeError as error:
                raise _parse_error(error) from None


def _parse_error(reason: object) -> StatusError:
    return StatusError(Code.INTERNAL, f"failed to parse the message ModelInferRequest: {reason}")


def _raw_pieces(datatype: str, name: str, values: Sequence[Any]) -> Iterator[bytes]:
    """Yield typed values as raw data, piece by piece; 8 and 16-bit types keep the lowest bits, as in Triton."""
    if datatype == BYTES:
        yield from join_in_pieces(values)
        return
    kind = DTYPES[_KIND_OF[name]]
    for i in range(0, len(values), _PIECE):
        yield np.array(values[i : i + _PIECE], kind).astype(DTYPES[datatype]).tobytes()


# ---------------------------------------------------------------------- answers


def response_bytes(
    model: Model, request: InferRequest, response: InferResponse, output_options: GrpcOutputOptions
) -> bytes:
    """Return an encoded ModelInferResponse. raises StatusError"""
    proto = message("ModelInferResponse")()
    raws = fill_response(proto, model, request, response, output_options)
    return concatenate([proto.SerializeToString(), *raws])


def fill_response(
    proto: Any, model: Model, request: InferRequest, response: InferResponse, output_options: GrpcOutputOptions
) -> list[bytes | memoryview]:
    """Fill an empty ModelInferResponse; return its tensors, which are written after it. raises StatusError"""
    proto.model_name, proto.model_version, proto.id = model.name, str(model.version), request.id
    for key, value in response.parameters.items():
        set_parameter(proto, key, value)
    raws = list[bytes | memoryview]()
    for tensor in requested_outputs(model, request, response, output_options.n_classes):
        proto.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.values.shape)
        parts: Sequence[bytes | memoryview] = ()
        if (place := output_options.shared.get(tensor.name)) is not None:
            place.write(tensor.name, tensor.raw())
        else:
            parts = tensor.raw_parts()
        # One for each output, as in Triton, whose clients count them.
        raws += (RAW_OUTPUT + varint(sum(map(len, parts))), *parts)
    return raws


def set_parameter(proto: Any, key: str, value: Any) -> None:
    """Set a parameter of a message. raises StatusError for a value that no parameter can hold"""
    kinds = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))
    name = next((name for kind, name in kinds if isinstance(value, kind)), None)
    try:
        if name is None:
            raise ValueError(f"it is {type(value).__name__}, no bool, int, float or string")
        setattr(proto.parameters[key], "uint64_param" if name == "int64_param" and value >= 1 << 63 else name, value)
    except ValueError as error:  # also text that is no UTF-8, and integers beyond 64 bits
        raise StatusError(Code.INTERNAL, f"response parameter '{key}': {error}") from None
