"""What the tests of models share."""

import pytest

from millrace.serve.inference import others


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of models that wait for one another are looked for five times as often; one is seen in two looks."""
    monkeypatch.setattr(others, "LOOK_S", 0.05)
