"""Claude Code: an agent's loop, from a question over a command that it runs to the answer."""

import json
import os
import subprocess
import tempfile

from report import MODEL, URL, check

VARIABLES = {
    "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip
ASK = ["claude", "-p", "Say the number.", "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]


def loop(variables: dict[str, str]) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ASK, cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-300:] + done.stdout[-1500:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_loop(events: list[dict[str, object]]) -> None:
    blocks = [
        block
        for event in events
        if event["type"] in ("assistant", "user")
        for block in event["message"]["content"]
        if isinstance(block, dict)
    ]
    (used,) = [block for block in blocks if block["type"] == "tool_use"]
    (result,) = [block for block in blocks if block["type"] == "tool_result"]
    assert used["name"] == "Bash" and result["tool_use_id"] == used["id"], used
    assert result["content"] == "millrace-42" and not result["is_error"], result
    assert events[-1]["subtype"] == "success" and events[-1]["result"] == "All is done.", events[-1]


@check("a loop with a command")
def _() -> None:
    check_loop(loop(VARIABLES))


@check("its own name of a model")
def _() -> None:
    """With no model named it asks for `claude-*`: `--served-model-name '*'` answers."""
    check_loop(loop({name: value for name, value in VARIABLES.items() if name != "ANTHROPIC_MODEL"}))
