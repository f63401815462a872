"""A collector of OpenTelemetry's spans, as small as may be: OTLP over HTTP, in a thread."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Collected:
    """url: of its traces. spans: as protobuf has them, with their resource's attributes. n_batches: requests"""

    url: str = ""
    spans: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    n_batches: int = 0

    def named(self, *names: str, within_s: float = 10) -> list[Any]:
        """One span of each of these names, which there must be, once all have come."""
        until_s = time.monotonic() + within_s
        while not set(names) <= {span.name for span, _ in list(self.spans)}:
            assert time.monotonic() < until_s, f"{names} of {[span.name for span, _ in self.spans]}"
            time.sleep(0.01)
        spans = [one for one, _ in self.spans if one.name in names]
        assert len(spans) == len(names), [s.name for s in spans]
        return sorted(spans, key=lambda span: names.index(span.name))


def attributes(of: Any) -> dict[str, Any]:
    """Of a span, an event or a resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(one) for one in found.values] if kind == "array_value" else found

    return {pair.key: plain(pair.value) for pair in of.attributes}


@contextmanager
def collector(status: int = 200, hangs: threading.Event | None = None) -> Iterator[Collected]:
    """status: that it answers with. hangs: it answers when this is set"""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf", self.headers
            found.n_batches += 1
            if hangs is not None:
                hangs.wait(30)
            if status == 200:
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    told = attributes(resource.resource)
                    found.spans += [(s, told) for scope in resource.scope_spans for s in scope.spans]
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="collector")
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield found
    finally:
        if hangs is not None:
            hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()
