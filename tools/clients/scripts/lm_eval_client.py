"""lm-eval over completions: generation, and multiple choice, which needs the prompt's log probabilities."""

import json
import subprocess
from pathlib import Path

from report import BASE, MODEL, check

TOKENIZER = Path(__file__).parents[3] / "src" / "millrace" / "bundled" / "tiny"
DATA = Path("lm-eval-tasks")
DATA.mkdir(exist_ok=True)
(DATA / "items.jsonl").write_text(
    "".join(json.dumps({"q": f"{i} + 1 =", "a": str(i + 1), "choices": [str(i), str(i + 1)]}) + "\n" for i in range(4))
)
COMMON = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {(DATA / "items.jsonl").resolve()}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
(DATA / "generate.yaml").write_text(f"""task: our_generate
{COMMON}output_type: generate_until
doc_to_target: "{{{{a}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""")
(DATA / "choice.yaml").write_text(f"""task: our_choice
{COMMON}output_type: multiple_choice
doc_to_choice: choices
doc_to_target: 1
metric_list:
  - metric: acc
""")


def evaluated(task: str) -> None:
    arguments = f"model={MODEL},base_url={BASE}/completions,tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    command = [
        "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", task, "--include_path",
        str(DATA.resolve()), "--limit", "4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    # behind a server's answer come pages of tracebacks that do not name it
    _, answer, text = said.partition("Response text:")
    assert done.returncode == 0 and task in done.stdout, text[:400] if answer else said[-400:]


@check("generation")
def _() -> None:
    evaluated("our_generate")


@check("multiple choice")
def _() -> None:
    evaluated("our_choice")
