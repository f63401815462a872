"""Each protocol has one place where errors are written."""

from pathlib import Path

import pytest

import millrace.serve

SERVE = Path(millrace.serve.__path__[0])
WRITERS = {
    'encode({"error": ': "protocols/kserve/http/infer_response.py",  # KServe over HTTP
    "grpc.StatusCode.INTERNAL": "protocols/kserve/grpc/server.py",
    "ErrorReply(error=": "http/errors.py",  # OpenAI's
}


@pytest.mark.parametrize("sign", WRITERS)
def test_errors_are_written_in_one_place(sign: str) -> None:
    found = [str(path.relative_to(SERVE)) for path in SERVE.rglob("*.py") if sign in path.read_text()]
    assert found == [WRITERS[sign]]
