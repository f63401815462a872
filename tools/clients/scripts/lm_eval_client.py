"""lm-eval over completions: generation, and multiple choice, which needs the prompt's log probabilities.

The numbers are those of lm-eval's own backend, transformers, on the same weights in float32.
"""

import json
import shutil
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


def evaluated(task: str, *model: str) -> list[object]:
    """What the model answered, sample by sample."""
    out = DATA / f"{task}-{model[0]}"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        "lm_eval", "--model", model[0], "--model_args", *model[1:], "--tasks", task, "--include_path",
        str(DATA.resolve()), "--limit", "4", "--log_samples", "--output_path", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    # behind a server's answer come pages of tracebacks that do not name it
    _, answer, text = said.partition("Response text:")
    assert done.returncode == 0 and task in done.stdout, text[:400] if answer else said[-400:]
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda s: s["doc_id"])
    return [line["resps"] for line in lines]


OURS = (
    "local-completions",
    f"model={MODEL},base_url={BASE}/completions,tokenizer={TOKENIZER},num_concurrent=2,max_retries=1,add_bos_token=True",
)
THEIRS = ("hf", f"pretrained={TOKENIZER},dtype=float32,add_bos_token=True")


@check("generation")
def _() -> None:
    ours, theirs = evaluated("our_generate", *OURS), evaluated("our_generate", *THEIRS)
    assert ours == theirs, f"{ours} by the server, {theirs} by transformers"


@check("multiple choice")
def _() -> None:
    ours, theirs = evaluated("our_choice", *OURS), evaluated("our_choice", *THEIRS)
    assert len(ours) == len(theirs) == 4, (len(ours), len(theirs))
    for mine, exact in zip(ours, theirs, strict=True):
        for ((got, greedy),), ((want, likeliest),) in zip(mine, exact, strict=True):
            assert abs(float(got) - float(want)) < 1e-3 and greedy == likeliest, f"{mine} by the server, {exact} by hf"
