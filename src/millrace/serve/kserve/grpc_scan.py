"""Large messages, looked over before protobuf decodes them, which holds the interpreter until it is done.

Tensors in raw_input_contents are copied as they are. Everything else becomes objects, many times as large.
"""

from collections.abc import Iterator

from millrace.serve.inference.status import StatusError, invalid
from millrace.serve.inference.tensors import MOST_STRINGS
from millrace.serve.kserve.messages import field_numbers

LARGE = 64 << 10  # bytes of a message: smaller ones are not looked over
MOST_TYPED = 16 << 20  # bytes of all typed contents together
MOST_BESIDE = 1 << 20  # bytes of names, shapes and parameters
_MOST_FIELDS = 1 << 16  # of a message that is no tensor
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT = 10  # bytes


class _BrokenError(Exception):
    """No message, as protobuf will say."""


def check(name: str, data: bytes) -> None:
    """name: of the message. raises StatusError where decoding it would take too much"""
    if len(data) <= LARGE:
        return
    try:
        match name:
            case "ModelInferRequest":
                _check(memoryview(data))
            case "RepositoryModelLoadRequest":  # with files
                for _ in _fields(memoryview(data), _MOST_FIELDS):
                    pass
            case _ if len(data) > MOST_BESIDE:
                raise invalid(f"the message {name} has {len(data)} bytes, at most {MOST_BESIDE} are supported")
    except _BrokenError:
        return


def _check(data: memoryview) -> None:
    request, tensor = field_numbers("ModelInferRequest"), field_numbers("ModelInferRequest.InferInputTensor")
    typed = beside = 0
    for number, begin, end in _fields(data, _MOST_FIELDS):
        if number == request["raw_input_contents"]:
            continue
        beside += end - begin
        if number != request["inputs"]:
            continue
        for inner, at, stop in _fields(data[begin:end], _MOST_FIELDS):
            if inner == tensor["contents"]:
                typed, beside = typed + stop - at, beside - (stop - at)
                _check_strings(data[begin + at : begin + stop])
    if typed > MOST_TYPED:
        what = f"the inputs have {typed} bytes in 'contents', at most {MOST_TYPED} are supported"
        raise invalid(f"{what}: send large tensors in 'raw_input_contents'")
    if beside > MOST_BESIDE:
        what = f"the request has {beside} bytes beside the data of its inputs, at most {MOST_BESIDE} are supported"
        raise invalid(what)


def _check_strings(contents: memoryview) -> None:
    """raises StatusError"""
    if len(contents) <= MOST_TYPED:  # others are refused as a whole
        for _ in _fields(contents, MOST_STRINGS):
            pass


def _fields(data: memoryview, most: int) -> Iterator[tuple[int, int, int]]:
    """Number, and where the content of each begins and ends. raises StatusError, _BrokenError"""
    at, end, n = 0, len(data), 0
    while at < end:
        n += 1
        if n > most:
            raise _too_many(most)
        key, at = _varint(data, at)
        match key & 7:
            case 0:  # a varint
                begin = at
                _, at = _varint(data, at)
            case 2:  # bytes
                size, begin = _varint(data, at)
                at = begin + size
            case kind:
                begin, at = at, at + _size_of(kind)
        if at > end:
            raise _BrokenError
        yield key >> 3, begin, at


def _size_of(kind: int) -> int:
    if kind not in _SIZES:
        raise _BrokenError
    return _SIZES[kind]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    found = shift = 0
    for i in range(at, min(at + _MOST_VARINT, len(data))):
        found |= (data[i] & 0x7F) << shift
        if data[i] < 0x80:
            return found, i + 1
        shift += 7
    raise _BrokenError


def _too_many(most: int) -> StatusError:
    return invalid(f"the request has more than {most} fields, or strings of one input: send them in fewer requests")
