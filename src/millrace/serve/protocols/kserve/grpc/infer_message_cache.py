"""Cache of inference messages whose tensors are in `raw_input_contents`.

The messages of a client are mostly the same but for the id and the data. What was read and checked of the rest once
holds for the next message, and so does the framing of the response.
"""

from dataclasses import dataclass
from typing import Any

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
_ID = key(3, BYTES)  # a field of ModelInferResponse, which follows the model's name and version


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


class InferMessageCache:
    """The cached messages of one server. If it is full, it begins anew. Thread-safe."""

    def __init__(self) -> None:
        self._messages: dict[tuple[RequestValidator, bytes], InferMessage] = {}

    def read(
        self, proto: Any, model: Model, shared: TenantRegions | None, cut: SplitInferRequest | None
    ) -> tuple[InferRequest, InferMessage]:
        """Read a request as `read_infer`; `proto` loses its data. raises StatusError"""
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
            return cached.template.fill([(data, 0) for data in raws], request_id), cached
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
