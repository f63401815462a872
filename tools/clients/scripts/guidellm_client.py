"""guidellm's benchmark command over both endpoints, with generated prompts."""

import json
import subprocess
from pathlib import Path

from report import MODEL, URL, check

TOKENIZER = Path(__file__).parents[3] / "src" / "millrace" / "bundled" / "tiny"


def benchmarked(request_format: str) -> None:
    out = Path(f"guidellm-{request_format.strip('/').replace('/', '-')}.json")
    out.unlink(missing_ok=True)
    command = [
        "guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}",
        "--profile", "kind=concurrent,streams=[2]", "--constraint", "kind=max_requests,count=6", "--tokenizer",
        f"kind=huggingface_auto,model={TOKENIZER}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={out}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and out.exists(), (done.stdout + done.stderr)[-600:]
    report = json.loads(out.read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] >= 6 and not totals["errored"], totals


@check("chat completions")
def _() -> None:
    benchmarked("/v1/chat/completions")


@check("completions")
def _() -> None:
    benchmarked("/v1/completions")
