"""What each precision costs in answers: perplexity and KL of a fixed text, beside the same checkpoint in float32.

    python -m benchmarks.perplexity --model tiny
    python -m benchmarks.perplexity --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw

`--text FILE` is read as llama-perplexity reads it (evaluate/windows.py), its first 120,000 characters. `tiny` reads
held-out documents of the generator that it was trained with, another checkpoint without a text what it drew itself in
float32 with fixed seeds; of these every token but the first is predicted. llama.cpp reads the same tokens of a GGUF
file, where it is installed. Writes results/perplexity-MODEL-TIME-COMMIT.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import pages_for
from benchmarks.names import named
from benchmarks.peers.workloads import Phase, Workload
from benchmarks.record import RESULTS, provenance, write_result
from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.find import BUNDLED
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.engine import Engine
from millrace.engine.executor import IntArray
from millrace.engine.kv import KvFormat
from millrace.evaluate.divergence import LogProbs, Reader, compared, log_probabilities, log_softmax
from millrace.evaluate.windows import windows
from millrace.kernels.precision import BF16_BY_TILES
from millrace.machine.cpu import usable_cores

DOCUMENTS, LENGTH = 32, 192  # how many, and tokens of each at most: a few thousand in all, and it takes seconds
CHARACTERS = 120_000  # of a text
ROWS = 96  # tokens whose logits one step gives
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences, each read for itself; of each, the tokens behind position `first` are predicted."""

    sequences: Sequence[IntArray]
    first: int = 0

    @property
    def n_scored(self) -> int:
        return sum(len(ids) - 1 - self.first for ids in self.sequences)

    @property
    def longest(self) -> int:
        return max(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine to be measured; what is None as `millrace build` chooses it."""

    name: str
    precision: str | None
    group: int = 128
    kv: KvFormat | None = None
    head: str | None = None
    tiles: bool = False


PRECISIONS = (
    Variant("fp32", "fp32"), Variant("fp32, int8 kv", "fp32", kv=KvFormat.INT8), Variant("bf16", "bf16"),
    Variant(BF16_BY_TILES, "bf16", tiles=True), Variant("w8a16", "w8a16"),
    Variant("w8a8 g64", "w8a8", 64), Variant("w8a8 g128", "w8a8"), Variant("w8a8 g256", "w8a8", 256),
    Variant("w8a8 g128, activations g32", "w8a8:32"),
    Variant("w8a8 g128, attention by tiles", "w8a8", tiles=True),
    Variant("w8a8 g128, int8 kv", "w8a8", kv=KvFormat.INT8),
    Variant("w4a8 g64", "w4a8", 64), Variant("w4a8 g128", "w4a8"),
)  # fmt: skip
# What nobody asked for, and other ways to compute what a file stores: its integers, in its own groups.
STORED = (
    Variant("as stored (default)", None), Variant("as stored, int8 kv", None, kv=KvFormat.INT8),
    Variant("w4a16, stored groups", "w4a16", 32), Variant("w8a8, stored groups", "w8a8", 32),
)  # fmt: skip
# A body in float32 under each head: what the head alone does to the answers.
HEADS = (
    Variant("head fp32", "fp32"), Variant("head w8a8 (default of w8a8 and w4a8)", "fp32", head="w8a8"),
    Variant("head w8a8, groups of 32", "fp32", 32, head="w8a8"), Variant("head w8a16", "fp32", head="w8a16"),
    Variant("head bf16", "fp32", head="bf16"), Variant("head w4a8, in two steps", "fp32", head="w4a8"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one engine; the last three beside the first of its table. weights ... head: as `benchmarks.names` says them"""

    precision: str
    weights: str
    activations: str
    head: str
    kv: str
    perplexity: float
    ratio: float  # of the perplexities
    mean_kl: float  # nats by which its distribution differs, on average over positions
    agreement: float  # share of positions whose likeliest token is the same


@contextmanager
def ours(folder: Path, variant: Variant, longest: int) -> Iterator[tuple[dict[str, str], Reader]]:
    """In which numbers an engine of ours computes, and how it reads; gone when the block ends. folder: or GGUF file"""
    source = Source.from_checkpoint(Checkpoint.open(folder), max(longest, LENGTH))
    asked = variant.precision and precision_map(variant.precision, variant.group, variant.head)
    options = BuildOptions(precision=asked or None, max_batch=ROWS, kv_format=variant.kv, tiles=variant.tiles)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "engine"
        write_engine(source, plan_engine(source, options), out, name=folder.stem)
        engine = Engine.open(out)
        executor = engine.executor(n_pages=pages_for(1, longest))
        yield named(engine), lambda ids, first: log_probabilities(executor, ids, first)
        executor.close()


@contextmanager
def llama_cpps(path: Path, longest: int, cache: int | None = None) -> Iterator[tuple[dict[str, str], Reader]]:
    """The same of llama.cpp.

    cache: the type of keys and values as of LlamaCppEngine; where it is said, attention is not fused
    """
    from benchmarks.peers.llama_cpp_engine import LlamaCppEngine, Tried, batches

    engine = LlamaCppEngine(path, usable_cores(), cache)
    size = Workload(Phase.PREFILL, users=1, prompt=longest, new=0)
    context, described = engine.context(size, Tried(flash=cache is None)), engine.describe()

    def read(ids: IntArray, first: int) -> LogProbs:
        context.keep(1, 0)
        n = len(ids) - 1
        with batches([[(int(token), at, 0, at >= first) for at, token in enumerate(ids[:-1])]]) as steps:
            context.decode(steps)
        return log_softmax(np.stack([context.logits(at, engine.vocab) for at in range(first, n)]))

    yield {key: str(getattr(described, key)) for key in ("weights", "activations", "head", "kv")}, read
    context.close()
    engine.close()


def costs(
    folder: Path,
    text: Text,
    variants: Sequence[Variant] = PRECISIONS,
    llama_cpp: bool = False,
    say: Say = lambda _: None,
) -> list[Cost]:
    """One for each variant; the first is the reference. llama_cpp: and one for it, on the same GGUF file.

    All engines are loaded at the same time, and memory holds the log probabilities of one sequence.
    """
    with ExitStack() as stack:
        engines = {v.name: stack.enter_context(ours(folder, v, text.longest)) for v in variants}
        if llama_cpp:
            engines["llama.cpp, the file as it is"] = stack.enter_context(llama_cpps(folder, text.longest))
        readers = {name: read for name, (_, read) in engines.items()}
        found = compared(
            readers[variants[0].name], readers, text.sequences, text.first,
            lambda done, of: say(f"{len(readers)} engines, {done} of {of} sequences read"),
        )  # fmt: skip
        return [
            Cost(name, **numbers, perplexity=s.perplexity, ratio=s.ratio, mean_kl=s.mean_kl, agreement=s.agreement)
            for (name, (numbers, _)), s in zip(engines.items(), found.values(), strict=True)
        ]


def tiny_text() -> Text:
    """Held-out stories with a question and its answer, as `tiny` was trained to read them."""
    from tools.tiny.world import BOS, held_out_exam

    tokenizer = Checkpoint.open(BUNDLED / "tiny").tokenizer
    exams = [held_out_exam(seed) for seed in range(DOCUMENTS)]
    texts = [e.prompt.removeprefix(BOS) + " " + e.choice.letter for e in exams]
    return Text([np.array(tokenizer.encode(text)[:LENGTH], np.int32) for text in texts])


def drawn_text(folder: Path) -> Text:
    """Text that the model draws itself in float32 from its beginning token, at temperature 1 with seeds 0, 1, ..."""
    begin = Checkpoint.open(folder).tokenizer.bos_token_id or 0
    how = [SamplingParams(temperature=1, seed=i, max_tokens=LENGTH - 1, ignore_eos=True) for i in range(DOCUMENTS)]
    outputs = LLM(str(folder), precision="fp32").generate([{"prompt_token_ids": [begin]}] * DOCUMENTS, how)
    return Text([np.array([begin, *o.outputs[0].token_ids], np.int32) for o in outputs])


def given_text(folder: Path, text: Path) -> Text:
    """The beginning of a file, in llama-perplexity's windows."""
    cut = windows(Checkpoint.open(folder).tokenizer, text.read_text(encoding="utf-8")[:CHARACTERS])
    return Text([*cut.ids], cut.first)


def show(found: Sequence[Cost], console: Console) -> None:
    table = Table("precision", "perplexity", "of the first's", "mean KL", "same likeliest token")
    for s in found:
        cells = f"{s.perplexity:.4f}", f"{s.ratio:.4f}", f"{s.mean_kl:.2e}", f"{s.agreement:.2%}"
        table.add_row(s.precision, *cells)
    console.print(table)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny", help='"tiny", or the folder of a checkpoint (default: %(default)s)')
    parser.add_argument("--text", type=Path, help="a text file to read instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    args = parser.parse_args()
    folder = BUNDLED / "tiny" if args.model == "tiny" else Path(args.model)
    if args.text:
        text, told = given_text(folder, args.text), f"{args.text.name}, in windows of llama-perplexity"
    elif args.model == "tiny":
        text, told = tiny_text(), "held-out documents of its generator"
    else:
        text, told = drawn_text(folder), "drawn by itself in float32"
    quantised_file = is_gguf(folder)
    precisions = (*PRECISIONS, *STORED) if quantised_file else PRECISIONS
    beside = quantised_file and find_spec("llama_cpp") is not None
    with Console(stderr=True).status("building") as status:
        found = costs(folder, text, precisions, beside, status.update)
        heads = costs(folder, text, HEADS, say=status.update)
    result: dict[str, Any] = {
        **provenance("benchmarks.perplexity"), "model": folder.stem, "text": told, "tokens": text.n_scored,
        "scores": [asdict(s) for s in found], "heads": [asdict(s) for s in heads],
    }  # fmt: skip
    path = write_result(f"perplexity-{folder.stem}", result, args.results)
    if args.json:
        print(json.dumps(result))
    else:
        show(found, Console())
        show(heads, Console())
        print(path)


if __name__ == "__main__":
    main()
