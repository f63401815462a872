"""Writes docs/models.md: which formats of which families run, by the tests that show it.

python -m tools.model_table

Runs tests/families/test_model_table.py (minutes), and needs the `dev` extra.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from millrace.checkpoint.config.families.all_families import FAMILIES

PAGE = Path("docs/models.md")
FORMATS = ("float", "FP8", "W8A8", "W4A8", "GPTQ", "AWQ", "GGUF")
TESTS = "tests/families/test_model_table.py"
HEAD = """# Models

Written by `python -m tools.model_table`; do not edit.

Architectures that run natively, and in which formats. Each cell is a test that ran on random weights of odd sizes:
floats against transformers in float64, integers against the reference interpreter, GGUF files against the checkpoint
that they were converted from. **yes**: the test passed; **-**: the format does not exist for it, or is not read.

- float: float32 and bfloat16 checkpoints
- FP8, W8A8, W4A8: weights that `millrace build --precision` rounds to fp8a16, w8a8 and w4a8
- GPTQ, AWQ: folders in these formats, whose codes are used as they are (docs/quantized-checkpoints.md)
- GGUF: files of llama.cpp's architecture of this name

Any other causal language model of transformers runs in PyTorch, slowly: `millrace serve MODEL --model-impl
transformers`. `millrace doctor MODEL` tells which way a checkpoint takes.

"""
ENCODERS = """
## Encoders

Embeddings and scores of two texts, in float32, bfloat16, W8A8 and W4A8: tests/families/test_encoders.py and
test_cross_encoders.py compare them with transformers.

"""


def run() -> dict[tuple[str, str], str]:
    """Return "yes" or "-" of each family and format. Exits if a test fails."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "nightly", f"--junitxml={report}", TESTS]
        if subprocess.run(command, check=False).returncode:
            sys.exit("a test failed: the page is not written")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        result: dict[tuple[str, str], str] = {}
        for case in cases:
            name = case.attrib["name"]
            format, family = name[name.index("[") + 1 : -1].split("-", 1)
            result[family, format] = "-" if case.find("skipped") is not None else "yes"
    return result


def page(cells: dict[tuple[str, str], str]) -> str:
    rows = [["Architecture", *FORMATS], ["---"] * (len(FORMATS) + 1)]
    decoders = [family for family in FAMILIES.values() if not family.is_encoder]
    for family in sorted(decoders, key=lambda f: f.architecture.lower()):
        rows.append([f"`{family.architecture}`", *(cells[family.name, format] for format in FORMATS)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    encoders = [
        f"- `{name}`"
        for family in FAMILIES.values()
        if family.is_encoder
        for name in (family.architecture, family.cross_encoder)
        if name
    ]
    return HEAD + table + "\n" + ENCODERS + "\n".join(encoders) + "\n"


def main() -> None:
    PAGE.write_text(page(run()))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
