"""Body of an inference over HTTP: JSON, with tensors inside it or in binary after it, or raw bytes alone.

A valid body is decoded in one pass, by types; an invalid one is read once more, for Triton's error text. JSON of a
wrong type is an internal error in Triton, so its status is 500.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import DeferredData, RawInput, RequestValidator, check_shape
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import DTYPES, Array
from millrace.serve.protocols.kserve.http.json_spans import JsonWithSpans, Span, span_or_value
from millrace.serve.protocols.kserve.http.json_values import from_json, no_json, not_a, parse_error, too_deep
from millrace.serve.protocols.kserve.request_fields import output_names, take_parameter
from millrace.serve.protocols.kserve.shared_memory import RegionPlace, TenantRegions, require_shared_memory

HEADER = "Inference-Header-Content-Length"
_LARGE = 64 << 10  # bytes of JSON
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_SHARED_SIZE = "shared_memory_byte_size"


class SharedParameters(Struct, gc=False):
    """The parameters of a tensor in shared memory."""

    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int = 0  # of any size: a region says what it has not
    shared_memory_byte_size: int | UnsetType = UNSET

    def place(self, shared: TenantRegions | None) -> RegionPlace | None:
        """Return the place of the tensor in shared memory; None if it is not there. raises StatusError"""
        region, size = self.shared_memory_region, self.shared_memory_byte_size
        if region is UNSET:
            return None
        regions = require_shared_memory(shared)
        if size is UNSET:
            raise parse_error(_SHARED_SIZE, f"attempt to access non-existing object member '{_SHARED_SIZE}'")
        return regions.place(region, self.shared_memory_offset, size)


class InferInputParameters(SharedParameters, gc=False):
    binary_data_size: _Size | UnsetType = UNSET


class InferInput(Struct, gc=False):
    name: str
    shape: list[_Size]
    datatype: str
    data: Any = UNSET
    parameters: InferInputParameters | UnsetType = UNSET


class InferOutputParameters(SharedParameters, gc=False):
    binary_data: bool | UnsetType = UNSET
    classification: _Size = 0


class InferOutput(Struct, gc=False):
    name: str
    parameters: InferOutputParameters | UnsetType = UNSET


class InferBody(Struct, gc=False):
    inputs: list[InferInput]
    id: str = ""
    parameters: dict[str, Any] | UnsetType = UNSET
    outputs: list[InferOutput] | UnsetType = UNSET


_decoder = msgspec.json.Decoder(InferBody)


@dataclass(slots=True)
class HttpOutputOptions:
    """How outputs are written. binary, n_classes, shared: by output, if set; binary_default: for the others

    inputs: places of inputs in shared memory, whose regions stay until the request is over
    """

    binary: dict[str, bool] = field(default_factory=dict)
    shared: dict[str, RegionPlace] = field(default_factory=dict)
    n_classes: dict[str, int] = field(default_factory=dict)
    binary_default: bool = False
    inputs: list[RegionPlace] = field(default_factory=list)


def read_infer(
    body: bytes, n_json: int | None, model: str, checker: RequestValidator, shared: TenantRegions | None = None
) -> tuple[InferRequest, HttpOutputOptions]:
    """Read an inference. n_json: bytes of JSON, None if all is JSON, 0 if nothing is

    shared: None if clients' shared memory is not read. raises StatusError
    """
    if n_json is not None and not 0 <= n_json <= len(body):
        raise invalid(f"inference header size should be in range (0, {len(body)}), got: {n_json}")
    if n_json == 0:
        request = InferRequest({})
        checker.attach_inputs(request, [checker.raw_input(request, memoryview(body))])
        return request, HttpOutputOptions(binary_default=True)
    decoded, spans = _read(memoryview(body)[:n_json])
    request, output_options = InferRequest({}, request_id=decoded.id), HttpOutputOptions()
    if decoded.parameters is not UNSET:
        output_options.binary_default = take_parameters(request, decoded.parameters)
    binary = memoryview(body)[len(body) if n_json is None else n_json :]
    inputs = _raw_inputs(decoded.inputs, spans, binary, model, shared, output_options.inputs)
    if decoded.outputs is not UNSET:
        request.outputs = _take_outputs(decoded.outputs, output_options, shared)
    checker.attach_inputs(request, inputs)
    return request, output_options


def _read(head: memoryview) -> tuple[InferBody, list[Span]]:
    """Decode the JSON, with long lists cut out of a large one. raises StatusError"""
    if len(head) <= _LARGE:
        return _decode(head), []
    cut = JsonWithSpans(head)
    return _decode(memoryview(cut.rest)), cut.spans


def _decode(head: memoryview) -> InferBody:
    try:
        try:
            return _decoder.decode(head)
        except msgspec.ValidationError as error:
            raise explain_type_error(msgspec.json.decode(head)) or StatusError(Code.INTERNAL, str(error)) from None
    except RecursionError:
        raise too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise no_json(error) from None


def _raw_inputs(
    inputs: Sequence[InferInput],
    spans: list[Span],
    binary: memoryview,
    model: str,
    shared: TenantRegions | None,
    places: list[RegionPlace],
) -> list[RawInput]:
    """Return the inputs. binary: the bytes after the JSON, of binary inputs in order; places: receives those used"""
    raw_inputs, at, shared_bytes = list[RawInput](), 0, 0
    for tensor in inputs:
        size = tensor.parameters.binary_data_size if tensor.parameters is not UNSET else UNSET
        _check_source(tensor, size)
        place = tensor.parameters.place(shared) if tensor.parameters is not UNSET else None
        if tensor.datatype not in DTYPES:
            raise invalid(f"invalid datatype for input {tensor.name}")
        shape = tuple(tensor.shape)
        n = check_shape(tensor.name, tensor.datatype, shape)
        data: memoryview | Array | DeferredData
        if place is not None:
            places.append(place)
            shared_bytes += place.byte_size
            require_shared_memory(shared).check_total(shared_bytes)
            data = DeferredData(place.read, place.byte_size)
        elif size is UNSET:
            values = span_or_value(tensor.data, spans)
            if isinstance(values, Span):
                data = DeferredData(partial(_span_array, values, tensor.name, tensor.datatype, shape, n))
            else:
                data = from_json(tensor.name, tensor.datatype, values, n).reshape(shape)
        else:
            data = binary[at : at + size]
            if len(data) < size:
                what = f"unexpected size for input '{tensor.name}', expecting {size - len(data)} additional bytes"
                raise invalid(f"{what} for model '{model}'")
            at += size
        raw_inputs.append(RawInput(tensor.name, tensor.datatype, shape, data))
    if at != len(binary):
        raise invalid(f"unexpected additional input data for model '{model}'")
    return raw_inputs


def _span_array(span: Span, name: str, datatype: str, shape: tuple[int, ...], n: int) -> Array:
    """raises StatusError"""
    return span.array(name, datatype, n).reshape(shape)


def _check_source(tensor: InferInput, size: int | UnsetType) -> None:
    is_shared = tensor.parameters is not UNSET and tensor.parameters.shared_memory_region is not UNSET
    if (tensor.data is not UNSET) + (size is not UNSET) + is_shared == 1:
        return
    present = {
        "'data'": tensor.data is not UNSET, "'binary_data_size'": size is not UNSET,
        "'shared_memory_region'": is_shared,
    }  # fmt: skip
    fields = [name for name, is_there in present.items() if is_there]
    raise invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {'set ' + ' '.join(fields) if fields else 'no field is set'}"
    )


def take_parameters(request: InferRequest, parameters: Mapping[str, Any]) -> bool:
    """Take a request's parameters, and return whether outputs are binary by default. raises StatusError"""
    binary = False
    for key, value in parameters.items():
        if key == "binary_data_output":
            if not isinstance(value, bool):
                raise _wrong(key, "boolean")
            binary = value
        elif key == "headers" or key.startswith("triton_"):
            raise invalid(
                f"{key} is reserved for Triton usage" if key == "headers" else
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )  # fmt: skip
        else:
            take_parameter(request, key, value, _wrong)
    return binary


def _wrong(key: str, expected: str) -> StatusError:
    """Return the error of a parameter of a wrong type."""
    if expected == "any":
        return invalid(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'.")
    word = {"id": "string", "count": "unsigned-integer", "natural": "unsigned-integer"}.get(expected, expected)
    return parse_error(key, not_a(word, word))


def _take_outputs(
    outputs: Sequence[InferOutput], output_options: HttpOutputOptions, shared: TenantRegions | None
) -> tuple[str, ...]:
    names = output_names(output.name for output in outputs)
    for output in outputs:
        if output.parameters is UNSET:
            continue
        if (place := output.parameters.place(shared)) is not None:
            output_options.shared[output.name] = place
        if output.parameters.binary_data is not UNSET:
            output_options.binary[output.name] = output.parameters.binary_data
        if output.parameters.classification:
            output_options.n_classes[output.name] = output.parameters.classification
    return names


def explain_type_error(body: Any) -> StatusError | None:
    """Return the error of the first field of a wrong type, in the words of Triton's JSON."""
    if not isinstance(body, dict):
        return StatusError(Code.INTERNAL, not_a("object", "object"))
    members = [("id", "string", str)] if "id" in body else []
    error = _member(body, members)
    if error is None and "parameters" in body and not isinstance(body["parameters"], dict):
        error = parse_error("parameters", not_a("object", "object"))
    error = error or _member(body, [("inputs", "array", list)])
    for tensor in body["inputs"] if error is None else ():
        if not isinstance(tensor, dict):
            return StatusError(Code.INTERNAL, not_a("object", "object"))
        error = error or _member(
            tensor, [("name", "string", str), ("shape", "array", list), ("datatype", "string", str)]
        )
        if error is None and not all(_is_size(d) for d in tensor["shape"]):
            error = parse_error("shape", not_a("unsigned-integer", "unsigned-integer"))
        error = error or _sizes(tensor, "binary_data_size", "shared_memory_region")
    if error is None and "outputs" in body:
        error = _member(body, [("outputs", "array", list)])
        for tensor in body["outputs"] if error is None else ():
            if not isinstance(tensor, dict):
                return StatusError(Code.INTERNAL, not_a("object", "object"))
            error = (
                error or _member(tensor, [("name", "string", str)]) or _sizes(tensor, "classification", "binary_data")
            )
    return error


def _member(mapping: Mapping[str, Any], members: Sequence[tuple[str, str, type]]) -> StatusError | None:
    for name, word, kind in members:
        if name not in mapping:
            return parse_error(name, f"attempt to access non-existing object member '{name}'")
        if not isinstance(mapping[name], kind):
            return parse_error(name, not_a(word, word))
    return None


def _sizes(tensor: Mapping[str, Any], size: str, other_field: str) -> StatusError | None:
    parameters = tensor.get("parameters", {})
    if not isinstance(parameters, dict):
        return parse_error("parameters", not_a("object", "object"))
    if size in parameters and not _is_size(parameters[size]):
        return parse_error(size, not_a("unsigned-integer", "unsigned-integer"))
    word, kind = ("boolean", bool) if other_field == "binary_data" else ("string", str)
    return _member(parameters, [(other_field, word, kind)] if other_field in parameters else [])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
