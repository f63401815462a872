"""Real models and data that lie beside the repository, in `../shared`; a test that needs them is skipped elsewhere."""

from pathlib import Path

import pytest

NOT_BESIDE = "is not beside this repository (../shared)"
SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(path: str) -> Path:
    """`SHARED / path`, or the calling test is skipped."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"{path} {NOT_BESIDE}")
    return found
