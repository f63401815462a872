"""Files under the names that commands of README and docs use, so that these run as they stand there."""

import json
import re
import shutil
from pathlib import Path

from gguf import GGMLQuantizationType as Kind

from millrace.compile.resolve_model import BUNDLED
from tests.support.gguf_files import write_gguf

CHECKPOINTS = ("tinyllama-1.1b",)
ENGINES = ("model", "tutorial", "small", "old", "new", "fitted")
REQUEST = {"messages": [{"role": "user", "content": "Tell me of a mill."}], "max_tokens": 8, "receipt": True}
_STORY = "Once upon a time a miller had a mill by the river, and every day the fox came by to look at the wheel. "
_HEADER = "question,choice0,choice1,choice2,choice3,answer\n"
_RESNET = """
backend: "identity"
max_batch_size: 32
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
_LLM = 'backend: "millrace" parameters { key: "model" value { string_value: "tiny" } }\n'


def write_page_files(folder: Path, repository_page: str) -> None:
    """Write everything that needs no command of Millrace: checkpoints, texts, questions, traffic, repositories.

    repository_page: docs/repository.md, whose configurations are written as they stand there
    """
    for name in CHECKPOINTS:
        shutil.copytree(BUNDLED / "tiny", folder / name)
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2.gguf"):
        write_gguf(folder / name, BUNDLED / "tiny", Kind.F16)
    for name, n in (("text.txt", 600), ("wiki.test.raw", 30)):
        (folder / name).write_text((_STORY * 4 + "\n") * n)
    for split, n in (("dev", 5), ("test", 3)):
        (folder / "mmlu" / split).mkdir(parents=True)
        rows = "".join(f"What is {i} + {i}?,{i},{2 * i},{3 * i},{4 * i},B\n" for i in range(1, n + 1))
        (folder / "mmlu" / split / f"sums_{split}.csv").write_text(_HEADER + rows)
    question = {"question": "Who has a mill?", "choices": ["the miller", "the fox"], "answer": 0}
    (folder / "my-questions.jsonl").write_text(json.dumps(question) + "\n")
    lines = [{"timestamp": 50 * i, "input_length": 20 + i, "output_length": 8, "hash_ids": [i % 3]} for i in range(64)]
    (folder / "traffic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "prompts.jsonl").write_text(json.dumps("Once upon a time") + "\n")
    (folder / "request.json").write_text(json.dumps(REQUEST))
    _write_repository(folder / "models", repository_page)
    _write_models(folder / "served", {"resnet50": _RESNET, "llm": _LLM})


def _write_repository(root: Path, page: str) -> None:
    configs = re.findall(r"^`models/([\w/.]+)`, with an empty folder .*?\n\n```protobuf\n(.*?)^```$", page, re.M | re.S)
    _write_models(root, {Path(name).parent.name: text for name, text in configs})
    assert configs, "the page has a configuration that is served"


def _write_models(root: Path, configs: dict[str, str]) -> None:
    for name, text in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
