"""The headers of W3C's Trace Context, as its sections 3.2 and 3.3 have them; a client may write anything into them."""

import pytest

from millrace.model_repository.tracing.trace_context import parse_parent
from millrace.serve.http.http_request import combine_duplicate_headers

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("text", [
    "", PARENT[:-1], PARENT + "0", PARENT + "-", PARENT + "\xff", PARENT.upper(), PARENT.replace(TRACE, "0" * 32),
    PARENT.replace(SPAN, "0" * 16), "ff" + PARENT[2:], f"00 {PARENT[3:]}", f"{PARENT},{PARENT}", "-" * 100_000,
    "0" * 100_000, f"cc{PARENT[2:]}-x,{PARENT}",
])  # fmt: skip
def test_parents_that_are_none(text: str) -> None:
    assert parse_parent(text, "a=1") is None and parse_parent(text.encode("latin-1"), None) is None


@pytest.mark.parametrize("state", [
    "a=1", "a=1,b=2", "a=1 ,\tb=2", "a=1,,b=2", "0tenant@vendor=x", "a-_*/=!~ +", "a=" + "v" * 256,
    ",".join(f"k{i}=v" for i in range(32)),
])  # fmt: skip
def test_states_are_passed_on_as_they_are(state: str) -> None:
    found = parse_parent(PARENT.encode(), state.encode())
    assert found is not None and (found.state, found.is_sampled) == (state, True)


@pytest.mark.parametrize("state", [
    "a", "=", "=1", "a=", "A=1", "0a=1", "a=1=2", "a=1,a=2", "a=\xff", "a=1\x00", "a b=1", "a@b@c=1", "a=" + "v" * 257,
    ",".join(f"k{i}=v" for i in range(33)), "a=1," * 129 + "b=2", "a" * 600 + "=1",
])  # fmt: skip
def test_states_that_are_wrong_go_nowhere(state: str) -> None:
    found = parse_parent(PARENT, state.encode("latin-1"))
    assert found is not None and found.state == ""


def test_of_two_parents_there_is_none_and_two_states_are_one() -> None:
    """As headers of one name are read everywhere here; `test_spans.py` sends them."""
    twice = combine_duplicate_headers(
        [(b"traceparent", PARENT.encode()), (b"host", b"x"), (b"traceparent", PARENT.encode())], b","
    )
    assert twice[b"host"] == b"x" and parse_parent(twice[b"traceparent"], None) is None
    states = combine_duplicate_headers([("tracestate", "a=1"), ("traceparent", PARENT), ("tracestate", "b=2")], ",")
    found = parse_parent(states["traceparent"], states["tracestate"])
    assert found is not None and found.state == "a=1,b=2"
