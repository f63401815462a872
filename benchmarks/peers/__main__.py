"""Millrace beside llama.cpp, OpenVINO and transformers, on the same random weights, round by round.

    python -m benchmarks.peers --shape tinyllama-1.1b --rounds 5
    python -m benchmarks.peers --model SmolLM2-135M-Instruct.Q4_1.gguf

Every engine is loaded in a process of its own and waits asleep for its turn. In a round each does each workload once,
with the machine's read bandwidth measured before and after; ratios are taken within a round, and their median counts.
The first round warms up. Packages of others come with the extra: pip install 'millrace[peers]'; an engine whose
packages are missing is left out, and the result says so. Some peers have an environment of their own under WORK/homes:
`python -m benchmarks.peers.homes` makes them. Of a model, the time until each is ready and the KL of its answers to
float32 are in the result, too. --isa avx2 hides wider instruction sets from everyone. Writes every sample into
results/peers-SHAPE-TIME-COMMIT.json.
Needs an otherwise idle machine: the load average is in the result.
"""

import argparse
import json
import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.peers.engine import CATALOGUE
from benchmarks.peers.homes import HIDING, ROOT
from benchmarks.peers.race import EXACT, Course, Race, Text, race
from benchmarks.peers.report import Findings, show, subject_name
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.record import RESULTS, count, write_result
from benchmarks.shapes import SHAPES
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.evaluate.text_windows import windows
from millrace.machine.cpu import usable_cores

# What runs a real model: its file as it is, and the best format of each peer. llama.cpp's copies come first: they are
# read by others as well.
OF_A_FILE = (
    "millrace", "llama.cpp", "llama.cpp-q8_0", "llama.cpp-f16", "llama.cpp-bf16", EXACT, "openvino-genai",
    "openvino-genai-q8_0", "openvino-genai-f16", "millrace-generate", "millrace-bf16-generate", "vllm-bf16",
    "vllm-fp32",
)  # fmt: skip
ONLY_OF_A_FILE = ("millrace", "llama.cpp", "millrace-generate", "millrace-bf16-generate", "millrace-fp32",
                  "llama.cpp-f16", "openvino-genai", "openvino-genai-q8_0", "openvino-genai-f16", "vllm-bf16",
                  "vllm-fp32")  # fmt: skip
WORKLOADS_OF_A_FILE = ("prefill-512", "decode-1", "decode-16")
CHARACTERS = 120_000  # of a text, as `benchmarks.perplexity` reads it
WINDOWS = 8  # of a text, some 250 tokens each


def run(course: Course, messages: Console) -> Race:
    """With progress: one line that changes on a terminal, one line for each step elsewhere."""
    if not messages.is_terminal:
        return race(course, lambda text: messages.print(text, highlight=False, markup=False, soft_wrap=True))
    with messages.status(course.shape) as status:
        return race(course, lambda text: status.update(escape(text)))


def read_text(model: Path, file: Path) -> Text:
    """The beginning of a text file in llama-perplexity's windows, as `benchmarks.perplexity` cuts it."""
    text = file.read_text(encoding="utf-8")[:CHARACTERS]
    cut = windows(Checkpoint.open(model).tokenizer, text)
    sequences = [ids for ids in cut.ids if len(ids) == len(cut.ids[0])][:WINDOWS]
    return Text(f"{file.name}, in windows of llama-perplexity", sequences, cut.first)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="llama-143m")
    parser.add_argument("--model", type=Path, help="a GGUF file of a real model instead of a shape")
    parser.add_argument("--rounds", type=count, default=5, help="samples of each pair (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=list(CATALOGUE), metavar="ENGINE",
                        help="any of: %(choices)s (default: all that take these weights)")  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD",
                        help="any of: %(choices)s (default: all; of a model three)")  # fmt: skip
    parser.add_argument("--isa", choices=list(HIDING), help="hide wider instruction sets from all engines")
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE",
                        help="to compare the answers of a model on (default: this project's license)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine (default: all cores)")
    parser.add_argument("--work", type=Path, default=Path("build/peers"),
                        help="for exported weights, built engines and logs (default: %(default)s)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--label", default="", help="goes into the file's name, for runs of a few engines")
    parser.add_argument("--json", action="store_true", help="print the result instead of tables")
    args = parser.parse_args()
    messages, out = Console(stderr=True), Console()
    subjects = [str(args.model)] if args.model else [*SHAPES] if args.shape == "all" else [args.shape]
    if args.isa:
        os.environ.update(HIDING[args.isa])  # of this process, whose probes count as well
    engines = args.engines or (
        [*OF_A_FILE] if args.model else [name for name in CATALOGUE if name not in ONLY_OF_A_FILE]
    )  # fmt: skip
    workloads = args.workloads or (WORKLOADS_OF_A_FILE if args.model else WORKLOADS)
    text = read_text(args.model, args.text) if args.model else None
    for subject in subjects:
        name = subject_name(subject)
        course = Course(
            subject, engines, [WORKLOADS[w] for w in workloads], args.rounds, args.threads, args.work / name, args.isa,
            text,
        )  # fmt: skip
        found = run(course, messages)
        result = Findings(course, found).result()
        path = write_result("-".join(filter(None, ("peers", name, args.isa, args.label))), result, args.results)
        if args.json:
            print(json.dumps(result))
        else:
            show(result, out)
            messages.print(f"written: {path}", highlight=False)


if __name__ == "__main__":
    main()
