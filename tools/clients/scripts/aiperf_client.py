"""NVIDIA's AIPerf, which measures chats as they stream."""

import json
import os
import subprocess
from pathlib import Path

from report import MODEL, URL, check

TOKENIZER = Path(__file__).parents[3] / "src" / "millrace" / "bundled" / "tiny"


@check("profile, streaming chats")
def _() -> None:
    out = Path("aiperf-out")
    command = [
        "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming", "--tokenizer",
        str(TOKENIZER), "--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "32",
        "--output-tokens-mean", "16", "--ui", "none", "--artifact-dir", str(out),
    ]  # fmt: skip
    # told that the hub is offline, it takes a folder's path for the name of a repository that it once fetched
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    (told,) = out.glob("**/profile_export_aiperf.json")
    assert json.loads(told.read_text())["request_count"]["avg"] == 6
