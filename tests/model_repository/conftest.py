"""What the tests of models share."""

import pytest

from millrace.model_repository.models import bls


@pytest.fixture
def short_bls_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests from model to model have a short timeout; loads in a circle are looked for more often."""
    monkeypatch.setattr(bls, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(bls, "LOAD_CHECK_INTERVAL_S", 0.05)
