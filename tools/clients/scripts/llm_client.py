"""Simon Willison's `llm`: a model of its file of OpenAI-like servers, from the command line and from Python."""

import os
import subprocess
from pathlib import Path

from report import BASE, MODEL, check

USER = Path("llm-user")
USER.mkdir(exist_ok=True)
os.environ["LLM_USER_PATH"] = str(USER.resolve())
(USER / "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {BASE}\n  supports_schema: true\n"
    f"- model_id: ours-text\n  model_name: {MODEL}\n  api_base: {BASE}\n  completion: true\n"
)


def told(*arguments: str) -> str:
    done = subprocess.run(["llm", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@check("prompt")
def _() -> None:
    assert told("-m", "ours", "-o", "max_tokens", "12", "What is the capital of France?").strip()


@check("no stream")
def _() -> None:
    assert told("-m", "ours", "--no-stream", "-o", "max_tokens", "12", "Hello!").strip()


@check("system and conversation")
def _() -> None:
    told("-m", "ours", "-s", "Answer in a word.", "-o", "max_tokens", "12", "Hello!")
    assert told("-c", "-o", "max_tokens", "12", "And again?").strip()


@check("completion")
def _() -> None:
    assert told("-m", "ours-text", "-o", "max_tokens", "12", "Paris is").strip()


@check("schema")
def _() -> None:
    told("-m", "ours", "--schema", "name, country", "-o", "max_tokens", "32", "A city")
