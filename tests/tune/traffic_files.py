"""Recordings that tests write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.tune.recorded_requests import Recording, read_recording

EPOCH_MS = 1_760_000_000_000 // 86_400_000 * 86_400_000  # a midnight in 2025, UTC


def line(at_s: float, n_input: int, n_output: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": EPOCH_MS + 1e3 * at_s, "input_length": n_input, "output_length": n_output, **more}


def written(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(told) + "\n" for told in lines))
    return path


def recording(path: Path, lines: Sequence[dict[str, Any]]) -> Recording:
    return read_recording(written(path, lines))
