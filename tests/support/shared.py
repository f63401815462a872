"""Real models and data that lie beside the repository, in `../shared`; a test that needs them is skipped elsewhere."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(path: str) -> Path:
    """`SHARED / path`, or the calling test is skipped."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"{path} is not beside this repository (../shared)")
    return found
