"""Scan of large messages before protobuf decodes them, because decoding holds the interpreter lock until it is done.

Tensors in raw_input_contents are split off a request and read in place. Everything else becomes objects, many times as
large; the typed contents of inputs are split off too, and decoded in pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import MAX_STRINGS
from millrace.protobuf import BYTES, MAX_VARINT, WireError, fields, key, varint
from millrace.serve.protocols.kserve.grpc.protobuf_messages import field_numbers

LARGE = 64 << 10  # bytes of a message: smaller ones are not scanned
MAX_TYPED_BYTES = 16 << 20  # bytes of all typed contents together
MAX_OTHER_BYTES = 1 << 20  # bytes of names, shapes and parameters
_MAX_FIELDS = 1 << 16  # of a message that is no tensor
_PIECE = 1 << 16  # bytes of contents, which are decoded at once


@dataclass(slots=True)
class SplitInferRequest:
    """A ModelInferRequest without its inputs' data. contents: by the index of an input, which keeps empty contents"""

    rest: bytes
    raw_contents: list[memoryview] = field(default_factory=list)
    contents: dict[int, list[memoryview]] = field(default_factory=dict)


def check_message(name: str, data: bytes) -> None:
    """Check a message. raises StatusError if decoding it would take too much"""
    if len(data) <= LARGE:
        return
    try:
        match name:
            case "ModelInferRequest":
                _split(memoryview(data))
            case "RepositoryModelLoadRequest":  # with files
                for _ in _fields(memoryview(data), _MAX_FIELDS):
                    pass
            case _ if len(data) > MAX_OTHER_BYTES:
                raise invalid(f"the message {name} has {len(data)} bytes, at most {MAX_OTHER_BYTES} are supported")
    except WireError:  # protobuf will say so
        return


def split_infer_request(data: bytes) -> SplitInferRequest | None:
    """Split a ModelInferRequest; None for a small or invalid one. raises StatusError as `check_message` does"""
    if len(data) <= LARGE:
        return None
    try:
        return _split(memoryview(data))
    except WireError:  # protobuf will say so
        return None


def _split(data: memoryview) -> SplitInferRequest:
    request, tensor = field_numbers("ModelInferRequest"), field_numbers("ModelInferRequest.InferInputTensor")
    split, remaining, n_inputs = SplitInferRequest(b""), list[bytes | memoryview](), 0
    n_typed = n_other = 0
    for number, kind, start, begin, end in _fields(data, _MAX_FIELDS):
        if (number, kind) == (request["raw_input_contents"], BYTES):
            split.raw_contents.append(data[begin:end])
            continue
        n_other += end - begin
        if (number, kind) != (request["inputs"], BYTES):
            remaining.append(data[start:end])
            continue
        inner, parts = data[begin:end], list[bytes | memoryview]()
        for of_input, its_kind, key_at, at, stop in _fields(inner, _MAX_FIELDS):
            part = inner[at:stop]
            if (of_input, its_kind) == (tensor["contents"], BYTES):
                n_typed, n_other = n_typed + len(part), n_other - len(part)
                _check_strings(part)
                if len(part) > _PIECE:
                    split.contents.setdefault(n_inputs, []).append(part)
                    parts.append(_header(tensor["contents"], 0))
                    continue
            parts.append(inner[key_at:stop])
        remaining += (_header(request["inputs"], sum(map(len, parts))), *parts)
        n_inputs += 1
    if n_typed > MAX_TYPED_BYTES:
        what = f"the inputs have {n_typed} bytes in 'contents', at most {MAX_TYPED_BYTES} are supported"
        raise invalid(f"{what}: send large tensors in 'raw_input_contents'")
    if n_other > MAX_OTHER_BYTES:
        what = f"the request has {n_other} bytes beside the data of its inputs, at most {MAX_OTHER_BYTES} are supported"
        raise invalid(what)
    split.rest = b"".join(remaining)
    return split


def _header(number: int, n_bytes: int) -> bytes:
    return key(number, BYTES) + varint(n_bytes)


@dataclass(slots=True)
class PackedField:
    """Encoded numbers of a field of InferTensorContents."""

    field: str
    data: memoryview


def contents_pieces(contents: memoryview) -> Iterator[bytes | PackedField]:
    """Yield messages of InferTensorContents and packed numbers, which together have the values of `contents`.

    contents: such a message, checked
    """
    numbers, kept_from = field_numbers("InferTensorContents"), 0
    names = {number: name for name, number in numbers.items()}
    fixed = (numbers["fp32_contents"], numbers["fp64_contents"])
    for number, kind, start, begin, end in _fields(contents, MAX_STRINGS):
        if kind == BYTES and end - begin > _PIECE and names.get(number, "bytes_contents") != "bytes_contents":
            yield bytes(contents[kept_from:start])
            for packed in _packed_pieces(contents[begin:end], has_varints=number not in fixed):
                yield PackedField(names[number], packed)
            kept_from = end
        elif start - kept_from >= _PIECE:
            yield bytes(contents[kept_from:start])
            kept_from = start
    yield bytes(contents[kept_from:])


def _packed_pieces(packed: memoryview, *, has_varints: bool) -> Iterator[memoryview]:
    """Yield pieces of whole numbers; a piece is a multiple of 4 and 8 bytes, and does not cut a varint."""
    begin = 0
    while begin < len(packed):
        end = begin + _PIECE
        while has_varints and end < min(len(packed), begin + _PIECE + MAX_VARINT) and packed[end - 1] & 0x80:
            end += 1
        yield packed[begin:end]
        begin = end


def _check_strings(contents: memoryview) -> None:
    """raises StatusError"""
    if len(contents) <= MAX_TYPED_BYTES:  # others are refused as a whole
        for _ in _fields(contents, MAX_STRINGS):
            pass


def _fields(data: memoryview, limit: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield fields as `protobuf.fields` does. raises StatusError if there are more than `limit`, WireError"""
    for n, one in enumerate(fields(data), 1):
        if n > limit:
            raise _too_many(limit)
        yield one


def _too_many(limit: int) -> StatusError:
    return invalid(f"the request has more than {limit} fields, or strings of one input: send them in fewer requests")
