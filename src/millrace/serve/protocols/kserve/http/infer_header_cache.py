"""Cache of the JSON of inference requests whose tensors are binary.

Triton's clients send tensors as bytes after a JSON that describes them. The JSON of a client's requests is mostly the
same but for `id`, so that what was read and checked of it once holds for the next request, and so does the JSON of the
response.
"""

import re
from dataclasses import dataclass

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.infer_template import InferTemplate, OutputSignature, output_signature
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.serve.protocols.kserve.http.infer_request import HttpOutputOptions, read_infer
from millrace.serve.protocols.kserve.http.infer_response import encode_response
from millrace.serve.protocols.kserve.shared_memory import TenantRegions

MAX_HEADERS, MAX_HEADER_BYTES = 512, 4 << 10  # about 2 MiB
# A first member `id` without escapes: JSON's text of it is the id itself, in requests and responses.
_ID = re.compile(rb'\{[ \t\r\n]*"id"[ \t\r\n]*:[ \t\r\n]*"([ !#-\[\]-~]+)"[ \t\r\n]*,')
_Key = tuple[RequestValidator, bool, bytes]  # of the model; whether an id was cut off; the rest of the JSON


@dataclass(slots=True)
class InferHeader:
    """The JSON of requests, read and checked.

    template: None if the JSON is not cached
    framing: the outputs of the last response, and the JSON that describes them, behind its `id`; None before the first
    """

    output_options: HttpOutputOptions
    template: InferTemplate | None = None
    framing: tuple[OutputSignature, bytes] | None = None

    def encode(self, model: Model, request: InferRequest, response: InferResponse) -> tuple[bytes, int | None]:
        """Encode a response as `encode_response`. raises StatusError"""
        if self.template is None or response.parameters:
            return encode_response(model, request, response, self.output_options)
        signature = output_signature(response.outputs)
        if self.framing is None or self.framing[0] != signature:
            body, n_json = encode_response(model, request, response, self.output_options)
            if n_json is not None and self._has_only_numbers(response, len(body) - n_json):
                self.framing = signature, body[len(_start(request)) : n_json]
            return body, n_json
        head = _start(request) + self.framing[1]
        return b"".join((head, *[array.tobytes() for array in response.outputs.values()])), len(head)

    def _has_only_numbers(self, response: InferResponse, n_bytes: int) -> bool:
        """Return whether the `n_bytes` behind a response's JSON are the values of all its outputs."""
        arrays = response.outputs.values()
        if self.output_options.n_classes or any(array.dtype.hasobject for array in arrays):
            return False
        return sum(array.nbytes for array in arrays) == n_bytes


def _start(request: InferRequest) -> bytes:
    """Return how the JSON of a response begins. The id needs no escapes, because its request is cached."""
    return b'{"id":"%b",' % request.id.encode() if request.id else b"{"


class InferHeaderCache:
    """The cached JSON of all requests of one server. If it is full, it begins anew."""

    def __init__(self) -> None:
        self._headers: dict[_Key, InferHeader] = {}

    def read(
        self, body: bytes, n_json: int | None, model: Model, shared: TenantRegions | None
    ) -> tuple[InferRequest, InferHeader]:
        """Read a request as `read_infer`. raises StatusError"""
        if n_json is None or not 0 < n_json <= MAX_HEADER_BYTES:
            request, options = read_infer(body, n_json, model.name, model.checker, shared)
            return request, InferHeader(options)
        id_match = _ID.match(body, 0, n_json)
        request_id, at = (id_match[1].decode(), id_match.end()) if id_match is not None else ("", 0)
        key = model.checker, at > 0, body[at:n_json]
        header = self._headers.get(key)
        if header is None or header.template is None or len(body) - n_json != header.template.n_bytes:
            return self._read_anew(body, n_json, model, shared, key)
        return header.template.fill(body, [n_json + offset for offset in header.template.offsets], request_id), header

    def _read_anew(
        self,
        body: bytes,
        n_json: int,
        model: Model,
        shared: TenantRegions | None,
        key: _Key,
    ) -> tuple[InferRequest, InferHeader]:
        """Read a request with another JSON, and cache it. raises StatusError"""
        request, options = read_infer(body, n_json, model.name, model.checker, shared)
        header = InferHeader(options)
        if options.inputs or options.shared:
            return request, header  # its regions may change
        template = InferTemplate.from_request(request, model.checker, len(body) - n_json)
        _, has_id, rest = key
        if template is None or (not has_id and request.id):
            return request, header
        if has_id and read_infer(b"{" + rest + body[n_json:], 1 + len(rest), model.name, model.checker)[0].id:
            return request, header  # another member `id` counts
        header.template = template
        if len(self._headers) >= MAX_HEADERS:
            self._headers.clear()
        self._headers[key] = header
        return request, header
