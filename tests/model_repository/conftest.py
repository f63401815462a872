"""What the tests of models share."""

import pytest

from millrace.model_repository.models import bls


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of models that wait for one another are looked for five times as often; one is seen in two looks."""
    monkeypatch.setattr(bls, "CHECK_INTERVAL_S", 0.05)
