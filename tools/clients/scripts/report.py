"""What every script here shares: the server's address, and one line of JSON for each thing that was tried.

Runs in the client's own environment, so it imports nothing but the standard library.
"""

import json
import sys
import traceback
from collections.abc import Callable

URL, MODEL = sys.argv[1:3]
BASE = f"{URL}/v1"


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """`@check("chat")` runs the function at once, and reports whether it ended without an error."""

    def run(tried: Callable[[], object]) -> None:
        try:
            tried()
            print(json.dumps({"check": name, "ok": True}), flush=True)
        except Exception as error:  # noqa: BLE001  whatever a client raises is the report
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            print(json.dumps({"check": name, "ok": False, "why": why[:500]}), flush=True)

    return run
