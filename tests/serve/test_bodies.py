"""Bodies on their way are bounded together, and who is slow with them does not keep others out."""

import time
from contextlib import ExitStack

from tests.serve.support import START, connect, post, serving_with


def test_unfinished_bodies_are_bounded_together() -> None:
    body = b'{"prompt": "' + b"a" * 700_000
    head = START + b"content-length: 800000\r\n\r\n"
    with serving_with(max_receiving_bytes=1_500_000, max_body_bytes=1_000_000) as server, ExitStack() as stack:
        holding = [stack.enter_context(connect(server)) for _ in range(2)]
        for raw in holding:
            raw.sendall(head + body)
        time.sleep(0.3)
        large = {"prompt": "a" * 400_000}
        refused = post(server.url, "/v1/completions", large)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_bodies", refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        for raw in holding:
            raw.close()
        until_s = time.monotonic() + 5
        while post(server.url, "/v1/completions", large).status_code == 503:
            assert time.monotonic() < until_s
