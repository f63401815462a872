"""Codex CLI: an agent's loop, from a question over a command that it runs to the answer."""

import json
import os
import subprocess
import tempfile

from report import BASE, MODEL, check

PROVIDER = f'{{name="millrace", base_url="{BASE}", wire_api="responses", env_key="OPENAI_API_KEY"}}'
# The command is the scripted model's, an echo.
ASK = [
    "codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL,
    "-c", 'model_provider="millrace"', "-c", f"model_providers.millrace={PROVIDER}", "Say the number.",
]  # fmt: skip


@check("a loop with a command")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ASK, cwd=folder, env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr[-300:] + done.stdout[-300:]
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert command["exit_code"] == 0 and command["aggregated_output"] == "millrace-42\n", command
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["All is done."], items
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["cached_input_tokens"] > 0, events[-1]
