"""Cache of inference messages whose tensors are in `raw_input_contents`.

The messages of a client are mostly the same but for the id and the data. What was read and checked of the rest once
holds for the next message, and so does the framing of the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.infer_template import InferTemplate, OutputSignature, output_signature
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.protobuf import BYTES, key, varint
from millrace.serve.protocols.kserve.grpc.infer import (
    RAW_OUTPUT,
    GrpcOutputOptions,
    read_infer,
    response_bytes,
)
from millrace.serve.protocols.kserve.grpc.message_scan import SplitInferRequest
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.shared_memory import TenantRegions

MAX_MESSAGES, MAX_MESSAGE_BYTES = 512, 4 << 10  # about 2 MiB; bytes without data
MAX_LENGTHS, MAX_PER_LENGTH = 64, 4
_RAW_INPUT = key(7, BYTES)  # a field of ModelInferRequest, its last
_ID = key(3, BYTES)  # a field of requests and responses, which follows the model's name and version


@dataclass(frozen=True, slots=True)
class ResponseFraming:
    """What responses with the same outputs have in common.

    before_id, after_id: the fields around the id; raw_headers: what precedes the data of each output
    """

    signature: OutputSignature
    before_id: bytes
    after_id: bytes
    raw_headers: tuple[bytes, ...]

    @classmethod
    def from_response(cls, model: Model, response: InferResponse, encoded: bytes) -> "ResponseFraming":
        """Return the framing of a response. encoded: with its id and its data, which must be numbers"""
        proto = message("ModelInferResponse")
        names = proto(model_name=model.name, model_version=str(model.version))
        outputs = proto.FromString(encoded)
        for field in ("model_name", "model_version", "id", "raw_output_contents"):
            outputs.ClearField(field)
        arrays = response.outputs
        headers = tuple(RAW_OUTPUT + varint(array.nbytes) for array in arrays.values())
        return cls(output_signature(arrays), names.SerializeToString(), outputs.SerializeToString(), headers)

    def encode(self, request: InferRequest, response: InferResponse) -> bytes:
        parts = [self.before_id]
        if request.id:
            request_id = request.id.encode()
            parts += (_ID, varint(len(request_id)), request_id)
        parts.append(self.after_id)
        for header, array in zip(self.raw_headers, response.outputs.values(), strict=True):
            parts += (header, array.tobytes())
        return b"".join(parts)


@dataclass(slots=True)
class InferMessage:
    """A message, read and checked. template: None if it is not cached; framing: of its last response"""

    output_options: GrpcOutputOptions
    template: InferTemplate | None = None
    framing: ResponseFraming | None = None

    def encode(self, model: Model, request: InferRequest, response: InferResponse) -> bytes:
        """Encode a response as `response_bytes`. raises StatusError"""
        if self.template is None or response.parameters or self.output_options.n_classes:
            return response_bytes(model, request, response, self.output_options)
        if self.framing is not None and self.framing.signature == output_signature(response.outputs):
            return self.framing.encode(request, response)
        encoded = response_bytes(model, request, response, self.output_options)
        if not any(array.dtype.hasobject for array in response.outputs.values()):
            framing = ResponseFraming.from_response(model, response, encoded)
            if framing.encode(request, response) == encoded:  # it is not if some outputs were not requested
                self.framing = framing
        return encoded


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The bytes of a message without its id and its data, to find the next one before protobuf decodes it.

    pieces: positions and bytes; id_place: begin and end of the id; offsets: where the data of each input begins
    """

    pieces: Sequence[tuple[int, bytes]]
    id_place: tuple[int, int]
    offsets: Sequence[int]
    model_name: str
    model_version: str
    validator: RequestValidator
    message: InferMessage

    @classmethod
    def from_message(
        cls, data: bytes, proto: Any, raws: Sequence[bytes], validator: RequestValidator, infer_message: InferMessage
    ) -> "MessageLayout | None":
        """Return the layout of a message; None unless the id follows the names, and the data is at the end.

        raws: the data of its inputs. protobuf writes fields in this order, but other orders are valid.
        """
        headers = [_RAW_INPUT + varint(len(raw)) for raw in raws]
        front = len(data) - sum(len(header) + len(raw) for header, raw in zip(headers, raws, strict=True))
        kind, encoded_id = type(proto), proto.id.encode()
        names = kind(model_name=proto.model_name, model_version=proto.model_version).SerializeToString()
        before_id = names + (_ID + varint(len(encoded_id)) if encoded_id else b"")
        id_place = len(before_id), len(before_id) + len(encoded_id)
        pieces, offsets, at = [(0, before_id), (id_place[1], data[id_place[1] : front])], list[int](), front
        for header, raw in zip(headers, raws, strict=True):
            pieces.append((at, header))
            offsets.append(at + len(header))
            at = offsets[-1] + len(raw)
        try:
            rest = kind.FromString(names + pieces[1][1])
        except DecodeError:
            return None
        layout = cls(pieces, id_place, offsets, proto.model_name, proto.model_version, validator, infer_message)
        is_complete = data[slice(*id_place)] == encoded_id and not rest.id and not rest.raw_input_contents
        return layout if is_complete and layout.matches(data) else None

    def matches(self, data: bytes) -> bool:
        """Return whether a message of the same length has this layout, and an id in ASCII."""
        for at, piece in self.pieces:
            if not data.startswith(piece, at):
                return False
        return data[self.id_place[0] : self.id_place[1]].isascii()

    def fill(self, data: bytes) -> InferRequest:
        """Return the request of a message that has this layout."""
        assert self.message.template is not None, "it is cached"
        request_id = data[self.id_place[0] : self.id_place[1]].decode()
        return self.message.template.fill(data, self.offsets, request_id)


class InferMessageCache:
    """The cached messages of one server. If it is full, it begins anew. Thread-safe."""

    def __init__(self) -> None:
        self._messages: dict[tuple[RequestValidator, bytes], InferMessage] = {}
        self._layouts: dict[int, list[MessageLayout]] = {}  # by the length of the message

    def find(self, data: bytes) -> MessageLayout | None:
        """Return the layout of a message that differs from an earlier one only in its id and its data, or None."""
        for layout in self._layouts.get(len(data), ()):
            if layout.matches(data):
                return layout
        return None

    def read(
        self, data: bytes, proto: Any, model: Model, shared: TenantRegions | None, cut: SplitInferRequest | None
    ) -> tuple[InferRequest, InferMessage]:
        """Read a request as `read_infer`; `proto`, which `data` encodes, loses its data. raises StatusError"""
        raws, request_id = list(proto.raw_input_contents), proto.id
        if cut is not None or not raws:
            request, options = read_infer(proto, model, shared, cut)
            return request, InferMessage(options)
        proto.ClearField("raw_input_contents")
        proto.ClearField("id")
        cache_key = model.checker, proto.SerializeToString(deterministic=True)
        proto.id = request_id
        cached = self._messages.get(cache_key)
        if cached is not None and cached.template is not None and [*map(len, raws)] == cached.template.sizes:
            self._add_layout(data, proto, raws, model.checker, cached)
            return cached.template.fill_with(raws, request_id), cached
        proto.raw_input_contents.extend(raws)
        request, options = read_infer(proto, model, shared)
        if options.inputs or options.shared or len(cache_key[1]) > MAX_MESSAGE_BYTES:  # regions may change
            return request, InferMessage(options)
        fresh = InferMessage(options, InferTemplate.from_request(request, model.checker, sum(map(len, raws))))
        if fresh.template is not None:
            if len(self._messages) >= MAX_MESSAGES:
                self._messages.clear()
            self._messages[cache_key] = fresh
        return request, fresh

    def _add_layout(
        self, data: bytes, proto: Any, raws: Sequence[bytes], validator: RequestValidator, infer_message: InferMessage
    ) -> None:
        """Add the layout of a message that was read a second time."""
        layouts = self._layouts.get(len(data), [])
        if any(layout.message is infer_message for layout in layouts):
            return
        layout = MessageLayout.from_message(data, proto, raws, validator, infer_message)
        if layout is None:
            return
        if len(self._layouts) >= MAX_LENGTHS:
            self._layouts.clear()
        self._layouts[len(data)] = [layout, *layouts][:MAX_PER_LENGTH]
