"""One server for all tests that only ask it things, and a quick broom for those that wait for it."""

from collections.abc import Iterator

import pytest

from millrace.serve import connections
from millrace.serve import server as server_module
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, running


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running(Fake(aliases=("org/alias",)), ServerSettings(port=0, max_body_bytes=2**20)) as started:
        yield started


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_TICKS", 1)
    monkeypatch.setattr(connections, "LINGER_S", 0.5)
