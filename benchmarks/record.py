"""What every result file says about where its numbers come from, and where it is written."""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.machine.cpu import cpu_model, huge_pages, memory, usable_cores

RESULTS = Path(__file__).parent / "results"


def provenance(module: str) -> dict[str, Any]:
    """Date, commit, command and machine; no names of hosts, no paths of this machine.

    module: what was started with `python -m`
    """
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join([f"python -m {module}", *(_without_folder(a) for a in sys.argv[1:])]),
        "machine": {
            "cpu": cpu_model(), "cores": usable_cores(), "memory_bytes": memory().total_bytes,
            "transparent_huge_pages": huge_pages(), "kernel": platform.release(),
        },
    }  # fmt: skip


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def commit() -> str:
    """The short id of what is checked out, with a + where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, cwd=RESULTS.parent
    )
    return done.stdout.strip() or "unknown"


def write_result(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """FOLDER/NAME.json; a second run of one day replaces the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
