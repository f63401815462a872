"""One server for all tests that only ask it things."""

from collections.abc import Iterator

import pytest

from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, running


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running(Fake(aliases=("org/alias",)), ServerSettings(port=0, max_body_bytes=2**20)) as started:
        yield started
