"""Cache of inference messages whose tensors are in `raw_input_contents`.

The messages of a client are mostly the same but for the id and the data. What was read and checked of the rest once
holds for the next message, and so does the framing of the response.
"""

from collections import OrderedDict
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
_ID = key(3, BYTES)  # a field of ModelInferResponse, between `_before_id` and `_after_id`


@dataclass(slots=True)
class InferMessage:
    """A message, read and checked.

    template: None if the message is not cached; before_id, after_id: fields of the last response
    raw_headers: what precedes the data of each of its outputs
    """

    output_options: GrpcOutputOptions
    template: InferTemplate | None = None
    signature: OutputSignature | None = None  # of the outputs that the framing describes
    before_id: bytes = b""
    after_id: bytes = b""
    raw_headers: tuple[bytes, ...] = ()

    def encode(self, model: Model, request: InferRequest, response: InferResponse) -> bytes:
        """Encode a response as `response_bytes`. raises StatusError"""
        if self.template is None or response.parameters:
            return response_bytes(model, request, response, self.output_options)
        arrays = response.outputs
        if output_signature(arrays) != self.signature:
            encoded = response_bytes(model, request, response, self.output_options)
            self._learn(model, request, response, encoded)
            return encoded
        return self._framed(request, response)

    def _framed(self, request: InferRequest, response: InferResponse) -> bytes:
        parts = [self.before_id]
        if request.id:
            request_id = request.id.encode()
            parts += (_ID, varint(len(request_id)), request_id)
        parts.append(self.after_id)
        for header, array in zip(self.raw_headers, response.outputs.values(), strict=True):
            parts += (header, array.tobytes())
        return b"".join(parts)

    def _learn(self, model: Model, request: InferRequest, response: InferResponse, encoded: bytes) -> None:
        """Remember the framing of a response whose outputs are all numbers."""
        arrays, options = response.outputs, self.output_options
        if options.n_classes or options.shared or any(array.dtype.hasobject for array in arrays.values()):
            return
        outputs = message("ModelInferResponse")()
        outputs.MergeFromString(encoded)
        for field in ("model_name", "model_version", "id", "raw_output_contents"):
            outputs.ClearField(field)
        self.before_id = message("ModelInferResponse")(
            model_name=model.name, model_version=str(model.version)
        ).SerializeToString()
        self.after_id = outputs.SerializeToString()
        self.raw_headers = tuple(RAW_OUTPUT + varint(array.nbytes) for array in arrays.values())
        self.signature = output_signature(arrays)
        if self._framed(request, response) != encoded:  # some outputs were not requested
            self.signature = None


class InferMessageCache:
    """The cached messages of one server; the least recently used leaves first."""

    def __init__(self) -> None:
        self._messages: OrderedDict[tuple[RequestValidator, bytes], InferMessage] = OrderedDict()

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
            self._messages.move_to_end(cache_key)
            return cached.template.fill([(data, 0) for data in raws], request_id), cached
        proto.raw_input_contents.extend(raws)
        request, options = read_infer(proto, model, shared)
        cached = InferMessage(options)
        if len(cache_key[1]) <= MAX_MESSAGE_BYTES and not (
            options.inputs or options.shared
        ):  # whose regions may change
            cached.template = InferTemplate.from_request(request, model.checker, sum(map(len, raws)))
        if cached.template is not None:
            self._messages[cache_key] = cached
            if len(self._messages) > MAX_MESSAGES:
                self._messages.popitem(last=False)
        return request, cached
