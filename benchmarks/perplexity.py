"""What each precision costs in accuracy: perplexity on a fixed text, beside the same engine in float32.

    python -m benchmarks.perplexity --model tiny
    python -m benchmarks.perplexity --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw

`tiny` reads held-out documents of the generator that it was trained with. Another checkpoint reads `--text FILE`, or,
where none is given, text that it drew itself in float32 with fixed seeds. Everything is computed by the native
executor, one token of every document a step, from its float32 logits; llama.cpp reads the same tokens of a GGUF file,
where it is installed. Writes results/perplexity-MODEL-TIME-COMMIT.json.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
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
from millrace.engine.dummy import dummy_step
from millrace.engine.engine import Engine
from millrace.engine.executor import StepInputs
from millrace.engine.kv import KvFormat
from millrace.kernels.precision import BF16_BY_TILES
from millrace.machine.cpu import usable_cores

if TYPE_CHECKING:
    from benchmarks.peers.llama_cpp_engine import Context

DOCUMENTS, LENGTH = 32, 192  # how many, and tokens of each at most: a few thousand in all, and it takes seconds
Documents = list[list[int]]
LogProbs = NDArray[np.float32]  # (positions of all documents, vocabulary)


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
    Variant(BF16_BY_TILES, "bf16", tiles=True), Variant("w8a8 g128, attention by tiles", "w8a8", tiles=True),
    Variant("w8a8 g128", "w8a8"), Variant("w8a8 g128, int8 kv", "w8a8", kv=KvFormat.INT8),
    Variant("w4a8 g32", "w4a8", 32), Variant("w4a8 g64", "w4a8", 64), Variant("w4a8 g128", "w4a8"),
    Variant("w4a8 g128, int8 kv", "w4a8", kv=KvFormat.INT8),
)  # fmt: skip
# What nobody asked for: integers as the file stores them, where engines hold them.
STORED = (Variant("as stored (default)", None), Variant("w8a8 g32", "w8a8", 32), Variant("w8a8 g64", "w8a8", 64))
# The same body under each head: what the head alone does to the ranking.
HEADS = (
    Variant("w4a8, head fp32", "w4a8", head="fp32"), Variant("w4a8, head in two steps (default)", "w4a8"),
    *(Variant(f"w4a8, head {head}", "w4a8", head=head) for head in ("w4a8", "w8a8", "bf16")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
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


def log_probabilities(engine: Engine, documents: Documents) -> LogProbs:
    """Of the token after each but the last of every document: one token of each document a step, longest first."""
    documents = sorted(documents, key=len, reverse=True)
    pages = pages_for(1, len(documents[0]))
    executor = engine.executor(n_pages=pages * len(documents))
    rows: list[list[LogProbs]] = [[] for _ in documents]
    for at in range(len(documents[0]) - 1):
        alive = [d for d in documents if at + 1 < len(d)]  # a prefix, because the longest come first
        executor.run(_one_token_each([d[at] for d in alive], at, pages))
        for row, logits in zip(rows, executor.output("logits"), strict=False):
            row.append(_log_softmax(logits))
    executor.close()
    return np.concatenate([np.stack(row) for row in rows])


def _logits(context: "Context", step: Any, vocab: int) -> LogProbs:
    """Of a batch of one token: a context gives the logits of one token of a sequence at a time."""
    context.decode([step])
    return _log_softmax(context.logits(0, vocab))


def _one_token_each(tokens: Sequence[int], at: int, pages: int) -> StepInputs:
    made = dummy_step([1] * len(tokens), at, pages * len(tokens))
    return replace(made, tokens=np.array(tokens, np.int32))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    found: NDArray[np.float32] = shifted - np.log(np.exp(shifted, dtype=np.float64).sum()).astype(np.float32)
    return found


@contextmanager
def built(folder: Path, variant: Variant, sequences: int) -> Iterator[Engine]:
    """An engine for steps of so many sequences, gone when the block ends. folder: or GGUF file"""
    source = Source.from_checkpoint(Checkpoint.open(folder))
    asked = variant.precision and precision_map(variant.precision, variant.group, variant.head)
    options = BuildOptions(precision=asked or None, max_batch=sequences, kv_format=variant.kv, tiles=variant.tiles)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "engine"
        write_engine(source, plan_engine(source, options), out, name=folder.stem)
        yield Engine.open(out)


def targets(documents: Documents) -> NDArray[np.int64]:
    """The tokens that `log_probabilities` has a row for, in its order."""
    return np.array([t for d in sorted(documents, key=len, reverse=True) for t in d[1:]])


def score(
    name: str, numbers: Mapping[str, str], found: LogProbs, reference: LogProbs, tokens: NDArray[np.int64]
) -> Score:
    at = np.arange(len(tokens))
    loss, reference_loss = (-float(x[at, tokens].mean(dtype=np.float64)) for x in (found, reference))
    divergence = (np.exp(reference) * (reference - found)).sum(axis=1, dtype=np.float64)
    return Score(
        name,
        **numbers,
        perplexity=float(np.exp(loss)),
        ratio=float(np.exp(loss - reference_loss)),
        mean_kl=float(divergence.mean()),
        agreement=float((found.argmax(axis=1) == reference.argmax(axis=1)).mean()),
    )


def scores(
    folder: Path, documents: Documents, precisions: Sequence[Variant] = PRECISIONS, llama_cpp: bool = False
) -> list[Score]:
    """One for each precision; the first is the reference. llama_cpp: and one for it, on the same GGUF file"""
    tokens, found = targets(documents), []
    reference: LogProbs | None = None
    for variant in precisions:
        with built(folder, variant, len(documents)) as engine:
            log_probs = log_probabilities(engine, documents)
            numbers = named(engine)
        reference = log_probs if reference is None else reference
        found.append(score(variant.name, numbers, log_probs, reference, tokens))
    if llama_cpp:
        assert reference is not None
        numbers, log_probs = of_llama_cpp(folder, documents)
        found.append(score("llama.cpp, the file as it is", numbers, log_probs, reference, tokens))
    return found


def of_llama_cpp(path: Path, documents: Documents, cache: int | None = None) -> tuple[dict[str, str], LogProbs]:
    """What llama.cpp computes with, and its `log_probabilities`.

    cache: the type of keys and values as of LlamaCppEngine; where it is said, attention is not fused
    """
    from benchmarks.peers.llama_cpp_engine import LlamaCppEngine, Tried, batches

    engine = LlamaCppEngine(path, usable_cores(), cache)
    size = Workload(Phase.PREFILL, users=1, prompt=max(map(len, documents)), new=0)
    context, rows = engine.context(size, Tried(flash=cache is None)), []
    described, vocab = engine.describe(), engine.vocab
    for document in sorted(documents, key=len, reverse=True):
        context.keep(1, 0)
        with batches([[(token, at, 0, True)] for at, token in enumerate(document[:-1])]) as steps:
            rows.append(np.stack([_logits(context, step, vocab) for step in steps]))
    context.close()
    engine.close()
    return {key: str(getattr(described, key)) for key in ("weights", "activations", "head", "kv")}, np.concatenate(rows)


def tiny_documents() -> Documents:
    """Held-out stories with a question and its answer, as `tiny` was trained to read them."""
    from tools.tiny.world import BOS, held_out_exam

    tokenizer = Checkpoint.open(BUNDLED / "tiny").tokenizer
    exams = [held_out_exam(seed) for seed in range(DOCUMENTS)]
    texts = [e.prompt.removeprefix(BOS) + " " + e.choice.letter for e in exams]
    return [tokenizer.encode(text)[:LENGTH] for text in texts]


def drawn_documents(folder: Path) -> Documents:
    """Text that the model draws itself in float32 from its beginning token, at temperature 1 with seeds 0, 1, ..."""
    begin = Checkpoint.open(folder).tokenizer.bos_token_id or 0
    how = [SamplingParams(temperature=1, seed=i, max_tokens=LENGTH - 1, ignore_eos=True) for i in range(DOCUMENTS)]
    outputs = LLM(str(folder), precision="fp32").generate([{"prompt_token_ids": [begin]}] * DOCUMENTS, how)
    return [[begin, *o.outputs[0].token_ids] for o in outputs]


def text_documents(folder: Path, text: Path) -> Documents:
    """The beginning of a file, in pieces of LENGTH tokens."""
    tokenizer = Checkpoint.open(folder).tokenizer
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = LENGTH - len(begin)
    few = text.read_text(encoding="utf-8")[: 16 * DOCUMENTS * LENGTH]  # characters: more than enough tokens
    ids = tokenizer.encode(few, add_special_tokens=False)[: DOCUMENTS * size]
    return [begin + ids[at : at + size] for at in range(0, len(ids), size)]


def show(found: Sequence[Score], console: Console) -> None:
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
        documents, text = text_documents(folder, args.text), args.text.name
    elif args.model == "tiny":
        documents, text = tiny_documents(), "held-out documents of its generator"
    else:
        documents, text = drawn_documents(folder), "drawn by itself in float32"
    quantised_file = is_gguf(folder)
    precisions = (*PRECISIONS, *STORED) if quantised_file else PRECISIONS
    beside = quantised_file and find_spec("llama_cpp") is not None
    found, heads = scores(folder, documents, precisions, beside), scores(folder, documents, HEADS)
    result: dict[str, Any] = {
        **provenance("benchmarks.perplexity"), "model": folder.stem, "text": text, "tokens": len(targets(documents)),
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
