"""What each precision costs in answers: perplexity and KL of a fixed text, beside the same checkpoint in float32.

    python -m benchmarks.perplexity --model tiny
    python -m benchmarks.perplexity --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw

`--text FILE` is read as llama-perplexity reads it, its first 120,000 characters (`--characters`);
`--only` names precisions of the tables, for a model of which all do not fit into memory at the same time. `tiny` reads
held-out documents of the generator that it was trained with, another checkpoint without a text what it drew itself in
float32 with fixed seeds; of these every token but the first is predicted. llama.cpp reads the same tokens of a GGUF
file, where it is installed. Each engine is timed, too, all in turns: `benchmarks.paces`.

A text is read in other cuts as well, 32 pieces of 192 tokens and four times as many, for a few precisions. Of a GGUF
file and a text, copies of the model in floats and in Q8_0 are read, each beside its own float32. `--peers` reads with
other engines instead, as they are timed on random weights (`benchmarks.recipes`). Writes
results/perplexity-MODEL-TIME-COMMIT.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.copies import copies
from benchmarks.measure import TILES, TUNE_S, bandwidth, pages_for
from benchmarks.names import named
from benchmarks.paces import CONTEXT, PACES, Speeds, in_turns
from benchmarks.peers.millrace_engine import MillraceEngine
from benchmarks.recipes import Loaded, Opening, llama_cpps, recipes
from benchmarks.record import RESULTS, provenance, write_result
from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compile.tune.tuner import Tuning
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import IntArray
from millrace.errors import RequestError
from millrace.evaluate.divergence import compared, log_probabilities
from millrace.evaluate.text_windows import windows
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from millrace.machine.cpu import usable_cores

DOCUMENTS, LENGTH = 32, 192  # how many, and tokens of each at most: a few thousand in all, and it takes seconds
LONG = 4  # short cuts in the longest: 192 tokens before a token are too few to tell precisions apart in one
LLAMA_CPP = "llama.cpp, the file as it is"
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
    Variant("fp32", "fp32"), Variant("fp32, int8 kv", "fp32", kv=KvFormat.INT8),
    Variant("fp32, fp8 kv", "fp32", kv=KvFormat.FP8), Variant("fp32, int4 kv", "fp32", kv=KvFormat.INT4),
    Variant("bf16", "bf16"),
    Variant(BF16_BY_TILES, "bf16", tiles=True), Variant("w8a16", "w8a16"),
    Variant("w8a8 g64", "w8a8", 64), Variant("w8a8 g128", "w8a8"), Variant("w8a8 g256", "w8a8", 256),
    Variant("w8a8 g128, activations g32", "w8a8:32"),
    Variant("w8a8 g128, attention by tiles", "w8a8", tiles=True),
    Variant("w8a8 g128, int8 kv", "w8a8", kv=KvFormat.INT8),
    Variant("w4a8 g64", "w4a8", 64), Variant("w4a8 g128", "w4a8"),
    Variant("w4a8 g128, attention by tiles", "w4a8", tiles=True),
)  # fmt: skip
# What nobody asked for, as a build here makes it, and other ways to compute what a file stores: its integers, in its
# own groups.
DEFAULT = Variant("as stored (default)", None, tiles=TILES)
STORED = (
    DEFAULT, *([Variant("as stored, sums in pairs", None)] if TILES else []),
    Variant("as stored, int8 kv", None, kv=KvFormat.INT8),
    Variant("w4a16, stored groups", "w4a16", 32), Variant("w8a8, stored groups", "w8a8", 32),
)  # fmt: skip
# In the short cut, and of copies of the weights.
SHORT = (
    Variant("fp32", "fp32"), Variant("bf16", "bf16"), Variant("w8a8 g128", "w8a8"),
    Variant("w8a8 g128, activations g32", "w8a8:32"), Variant("w8a8 g64", "w8a8", 64), DEFAULT,
)  # fmt: skip
COPIES = (Variant("fp32", "fp32"), Variant("w8a8 g128", "w8a8"), DEFAULT)
# Beside other engines that round float weights as well.
ROUNDED = (Variant("fp32", "fp32"), Variant("bf16", "bf16"), Variant("w8a8 g128", "w8a8"), Variant("w4a8 g128", "w4a8"))
# A body in float32 under each head: what the head alone does to the answers.
HEADS = (
    Variant("head fp32", "fp32"), Variant("head w8a8 (default of w8a8 and w4a8)", "fp32", head="w8a8"),
    Variant("head w8a8, groups of 32", "fp32", 32, head="w8a8"),
    Variant("head w8a16 (default of w4a16 and fp8a16)", "fp32", head="w8a16"),
    Variant("head bf16", "fp32", head="bf16"), Variant("head fp8a16", "fp32", head="fp8a16"),
    Variant("head w4a8, in two steps", "fp32", head="w4a8"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one engine; ratio, mean_kl and agreement beside the first of its table.

    weights ... head, attention: as `benchmarks.names` says them; speed: as `benchmarks.paces` does, where it was timed
    """

    precision: str
    weights: str
    activations: str
    head: str
    kv: str
    perplexity: float
    ratio: float  # of the perplexities
    mean_kl: float  # nats by which its distribution differs, on average over positions
    agreement: float  # share of positions whose likeliest token is the same
    attention: str = ""
    speed: Speeds | None = None

    def as_dict(self) -> dict[str, Any]:
        """As it goes into a result file, without a speed where there is none."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@contextmanager
def ours(folder: Path, variant: Variant, longest: int, *, timed: bool = False) -> Iterator[Loaded]:
    """One of ours; gone when the block ends. folder: or GGUF file; timed: tuned, with room for what is timed"""
    source = Source.from_checkpoint(Checkpoint.open(folder), max(longest, LENGTH, CONTEXT if timed else 0))
    asked = variant.precision and precision_map(variant.precision, variant.group, variant.head)
    options = BuildOptions(precision=asked or None, max_batch=ROWS, kv_format=variant.kv, tiles=variant.tiles)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "engine"
        tuning = Tuning(TUNE_S) if timed else None
        write_engine(source, plan_engine(source, options), out, name=folder.stem, tuning=tuning)
        opened = Engine.open(out)
        room = max(pages_for(w.users, w.prompt + w.new) for w in PACES) if timed else 0
        engine = MillraceEngine(opened, usable_cores(), n_pages=max(pages_for(1, longest), room))
        yield Loaded(named(opened), lambda ids, first: log_probabilities(engine.executor, ids, first), engine)
        engine.executor.close()


def costs(
    folder: Path,
    text: Text,
    variants: Sequence[Variant] = PRECISIONS,
    beside: Mapping[str, Opening] | None = None,
    say: Say = lambda _: None,
    *,
    timed: bool = False,
) -> list[Cost]:
    """One for each variant; the first is the reference. beside: others' engines, by their names.

    All engines are loaded at the same time, and memory holds the log probabilities of one sequence.
    timed: and each is timed, in turns, before it reads
    """
    with ExitStack() as stack:
        engines = {v.name: stack.enter_context(ours(folder, v, text.longest, timed=timed)) for v in variants}
        for name, opening in (beside or {}).items():
            engines[name] = stack.enter_context(opening(text.longest))
        speeds: dict[str, Speeds] = {}
        if timed:
            paced = {name: e.engine for name, e in engines.items() if e.engine is not None}
            speeds = in_turns(paced, _bandwidth, say=say)
        readers = {name: e.read for name, e in engines.items()}
        found = compared(
            readers[variants[0].name], readers, text.sequences, text.first,
            lambda done, of: say(f"{len(readers)} engines, {done} of {of} sequences read"),
        )  # fmt: skip
        return [
            Cost(
                name, **engines[name].numbers, perplexity=s.perplexity, ratio=s.ratio, mean_kl=s.mean_kl,
                agreement=s.agreement, speed=speeds.get(name),
            )
            for name, s in found.items()
        ]  # fmt: skip


def _bandwidth() -> float:
    return bandwidth(usable_isas()[0], usable_cores())


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


def given_text(folder: Path, text: Path, characters: int = CHARACTERS) -> Text:
    """The beginning of a file, in llama-perplexity's windows."""
    cut = windows(Checkpoint.open(folder).tokenizer, text.read_text(encoding="utf-8")[:characters])
    return Text([*cut.ids], cut.first)


def short_text(folder: Path, text: Path, most: int = DOCUMENTS) -> Text:
    """The beginning of a file in `most` pieces of LENGTH tokens, each behind the beginning token where there is one;
    every token but the first is predicted. Fewer pieces of a short text, at least one. raises RequestError"""
    tokenizer = Checkpoint.open(folder).tokenizer
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = LENGTH - len(begin)
    ids = tokenizer.encode(text.read_text(encoding="utf-8")[:CHARACTERS], add_special_tokens=False)
    n = min(most, len(ids) // size)
    if not n:
        raise RequestError(f"the text has {len(ids)} tokens", f"at least {size}, one piece", "give a longer text")
    return Text([np.array(begin + ids[at : at + size], np.int32) for at in range(0, n * size, size)])


def more(folder: Path, file: Path, text: Text, beside: Mapping[str, Opening], say: Say) -> Iterator[dict[str, Any]]:
    """Further tables: of the short cut; then, of a GGUF file, of its copies, in the same windows as the file."""
    for most, about in ((DOCUMENTS, "the short cut"), (LONG * DOCUMENTS, f"up to {LONG} times the short cut")):
        cut = short_text(folder, file, most)
        found = costs(folder, cut, SHORT, beside, say)
        yield _table(about, f"{len(cut.sequences)} pieces of {cut.longest} tokens", cut, found)
    if not is_gguf(folder):
        return
    with copies(folder) as made:
        for name, copy in made.items():
            found = costs(copy, text, COPIES, say=say)
            yield _table(f"its weights as {name}", "the same windows", text, found)


def _table(about: str, told: str, text: Text, found: Sequence[Cost]) -> dict[str, Any]:
    return {"about": about, "text": told, "tokens": text.n_scored, "scores": [s.as_dict() for s in found]}


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    speeds = [w.name for w in PACES] if any("speed" in s for s in found) else []
    table = Table("precision", "perplexity", "of the first's", "mean KL", "same likeliest token", *speeds)
    for s in found:
        cells = f"{s['perplexity']:.4f}", f"{s['ratio']:.4f}", f"{s['mean_kl']:.2e}", f"{s['agreement']:.2%}"
        rates = [f"{s['speed'][name]['tokens_per_s']:,.0f}" for name in speeds]
        table.add_row(s["precision"], *cells, *rates)
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
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of the text (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PRECISION", help="these alone; the first is the reference")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="only answers, no times")
    parser.add_argument("--no-more", dest="more", action="store_false", help="no other cut of the text, no copies")
    parser.add_argument(
        "--peers", action="store_true", help="other engines' roundings of a GGUF file's weights instead"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    args = parser.parse_args()
    folder = BUNDLED / "tiny" if args.model == "tiny" else Path(args.model)
    if args.text:
        text, told = given_text(folder, args.text, args.characters), f"{args.text.name}, in windows of llama-perplexity"
    elif args.model == "tiny":
        text, told = tiny_text(), "held-out documents of its generator"
    else:
        text, told = drawn_text(folder), "drawn by itself in float32"
    quantised_file = is_gguf(folder)
    if args.peers and not quantised_file:
        parser.error(f"--peers: {folder} is no GGUF file; give --model one")
    precisions = (*PRECISIONS, *STORED) if quantised_file else PRECISIONS
    if args.only:
        known = {v.name: v for v in precisions}
        if unknown := [name for name in args.only if name not in known]:
            parser.error(f"--only: {unknown[0]!r} is none of {', '.join(known)}")
        precisions = tuple(known[name] for name in args.only)
    beside: dict[str, Opening] = {}
    if quantised_file and find_spec("llama_cpp") is not None:
        beside[LLAMA_CPP] = partial(llama_cpps, folder)
    heads: list[Cost] = []
    others: list[dict[str, Any]] = []
    with Console(stderr=True).status("building") as status:
        if args.peers:
            with recipes(folder) as made:
                found = costs(folder, text, ROUNDED, made, status.update)
        else:
            found = costs(folder, text, precisions, beside, status.update, timed=args.speed)
            heads = [] if args.only else costs(folder, text, HEADS, say=status.update)
            if args.text and args.more:
                others = [*more(folder, args.text, text, beside, status.update)]
    result: dict[str, Any] = {
        **provenance("benchmarks.perplexity"), "model": folder.stem, "text": told, "tokens": text.n_scored,
        "scores": [s.as_dict() for s in found], "heads": [s.as_dict() for s in heads], "more": others,
    }  # fmt: skip
    path = write_result(f"perplexity-{folder.stem}", result, args.results)
    if args.json:
        print(json.dumps(result))
    else:
        for scores in filter(None, (result["scores"], result["heads"], *(m["scores"] for m in others))):
            show(scores, Console())
        print(path)


if __name__ == "__main__":
    main()
