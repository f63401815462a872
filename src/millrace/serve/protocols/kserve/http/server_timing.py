"""Where a request's time went, told to whoever asks for it with a header: `server-timing`, as browsers read it."""

import time

from millrace.model_repository.request.infer_request import InferRequest

TIMING_HEADER = b"x-millrace-timing"


def server_timing(request: InferRequest, arrived_ns: int) -> list[tuple[bytes, bytes]]:
    """`server-timing`, as browsers read it: each model that computed for the request, in the order in which they ended.

    Milliseconds: until it was read; of each model its queue, inputs, inference, outputs; all until it is written.
    """
    if request.hops is None:
        return []
    entries = [("read", "", request.received_ns - arrived_ns)]
    for hop in request.hops:
        phases = (("queue", hop.queued_ns, hop.started_ns), ("compute_input", hop.started_ns, hop.computing_ns),
                  ("compute_infer", hop.computing_ns or hop.started_ns, hop.computed_ns or hop.done_ns),
                  ("compute_output", hop.computed_ns, hop.done_ns))  # fmt: skip
        entries += [(name, hop.model, end - begin) for name, begin, end in phases if begin and end]
    entries.append(("total", "", time.monotonic_ns() - arrived_ns))
    texts = [f"{name}{_described(model)};dur={ns / 1e6:.3f}" for name, model, ns in entries]
    return [(b"server-timing", ", ".join(texts).encode())]


def _described(model: str) -> str:
    """A quoted string of HTTP; what no header can hold is left out of the name."""
    plain = "".join(c for c in model if " " <= c <= "~" and c not in '"\\')
    return f';desc="{plain}"' if model else ""
