"""llama.cpp through the C bindings of llama-cpp-python, set up as it is fastest.

Weights are read into memory that may lie in huge pages and repacked where llama.cpp can, all cores work. Flash
attention is tried on and off in the warm-up, for long prompts a physical batch of 2,048 tokens beside llama-bench's
512: what was faster is measured, and the result file says what it was. Users share one context and one batch, as in
llama-batched-bench; each has a stream of the KV cache of its own, which llama.cpp decodes 1.3 to 1.5 times as fast as
one cache for all.

benchmarks/peers/build.py says how it is built, with AMX or without, and how an environment chooses the build; the
result file says what the processor has and the build leaves unused, and what was to be built in and is not.

How it does where there is no AVX-512: LLAMA_CPP_AVX2 names the `llama_cpp/lib` folder of another llama-cpp-python,
built from source with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON".
"""

import ctypes
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers import gguf_file
from benchmarks.peers.build import amx, undocumented, unused, usable
from benchmarks.peers.engine import Description, Floats, IntArray
from benchmarks.peers.timing import best_times, seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Phase, Workload
from millrace.evaluate.divergence import LogProbs, log_softmax
from millrace.machine.cpu import cpu_flags

BATCH = 2048
ALWAYS_FLASH = 4096  # prompts from this length on are mostly attention: trying them without would take minutes


Token = tuple[int, int, int, bool]  # id, position, sequence, whether its logits are wanted


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "LlamaCppEngine":
    """`variant`: BF16, what llama.cpp's quantiser is asked for, or "file": the model's file as it is."""
    return LlamaCppEngine(_file(weights, variant, folder), threads)


def prepare(weights: NamedWeights, variant: str, folder: Path) -> None:
    if variant == "file":
        return
    if weights.file is None:
        plain = folder / "llama-bf16.gguf"
        if not plain.exists():
            gguf_file.write_gguf(plain, weights, "bf16")
    else:  # with its tokenizer, which others read the copies with
        plain = folder / "llama-f32.gguf"
        if not plain.exists():
            gguf_file.quantise(weights.file, plain, "F32")
    path = _file(weights, variant, folder)
    if not path.exists():
        gguf_file.quantise(plain, path, variant)


def _file(weights: NamedWeights, variant: str, folder: Path) -> Path:
    if variant != "file":
        return folder / f"llama-{variant.lower()}.gguf"
    assert weights.file is not None, "random weights lie in no file"
    return weights.file


def version() -> str:
    """Of the package, and of the ggml inside, with its commit where the build says it."""
    base = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base.so*"))))
    told = []
    for name in ("ggml_version", "ggml_commit"):
        ask = getattr(base, name)
        ask.restype = ctypes.c_char_p
        told.append(ask().decode())
    return f"{llama_cpp.__version__} (ggml {told[0]}, commit {told[1]})"


def _activations(types: Mapping[str, int]) -> str:
    """ggml rounds them to the partner type of the weights: Q8_0 or Q8_1 in blocks of 32, Q8_K in blocks of 256."""
    kind = max(types, key=types.__getitem__)
    if kind in ("BF16", "F32"):
        return {"BF16": "bf16", "F32": "fp32"}[kind]
    return f"int8, groups of {256 if kind.endswith('_K') else 32}"


@dataclass(frozen=True, slots=True)
class Tried:
    """flash: attention; physical_batch: tokens that one pass over the weights takes"""

    flash: bool
    physical_batch: int = 512  # as in llama-bench


def _settings(w: Workload) -> list[Tried]:
    """What is worth a try for a workload."""
    flash = (True,) if w.prompt >= ALWAYS_FLASH else (True, False)
    sizes = (512, BATCH) if w.phase is Phase.PREFILL and w.prompt > 512 else (512,)
    return [Tried(*both) for both in itertools.product(flash, sizes)]


class LlamaCppEngine:
    def __init__(self, path: Path, threads: int, cache: int | None = None) -> None:
        """`cache`: ggml's type of keys and values; None: float16, the default."""
        logging.getLogger("llama-cpp-python").setLevel(logging.WARNING)
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_default_params()
        loaded.use_mmap = False  # weights in memory of its own may lie in huge pages, a mapped file may not
        model = llama_cpp.llama_model_load_from_file(bytes(path), loaded)
        if model is None:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        self._model, self._path, self._threads, self._cache = model, path, threads, cache
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._contexts: dict[Workload, Context] = {}
        self._chosen: dict[Workload, Tried] = {}
        self._taken_s: dict[Workload, dict[Tried, float]] = {}

    def describe(self) -> Description:
        system = llama_cpp.llama_print_system_info().decode().strip(" |")
        flags = usable(cpu_flags(), hidden := os.environ.get("MILLRACE_ISA"))
        settings: dict[str, Any] = {
            "system": system,
            "amx": amx(system),
            "unused": unused(system, flags),
            "asked_for_and_lacking": undocumented(system, flags),
            "tensors": gguf_file.types(self._path),
            **({"isa": hidden} if hidden else {}),
            "chosen": {w.name: asdict(tried) for w, tried in self._chosen.items()},
            "tried": {w.name: [{**asdict(k), "seconds": t} for k, t in of.items()] for w, of in self._taken_s.items()},
        }
        types = gguf_file.types(self._path)
        return Description(
            version(), weights=max(types, key=types.__getitem__), activations=_activations(types),
            head=gguf_file.head_type(self._path), kv="fp16" if self._cache is None else str(self._cache),
            weights_bytes=llama_cpp.llama_model_size(self._model),
            read_bytes_per_step=gguf_file.read_per_step(self._path), settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        """Keeps the context of the setting that was fastest."""
        contexts = {tried: self.context(workload, tried) for tried in _settings(workload)}
        taken_s = best_times(contexts, lambda tried: _run(contexts[tried], workload, self.vocab))
        chosen, self._taken_s[workload] = min(taken_s, key=taken_s.__getitem__), taken_s
        self._chosen[workload], self._contexts[workload] = chosen, contexts.pop(chosen)
        for context in contexts.values():
            context.close()

    def run(self, workload: Workload) -> float:
        return _run(self._contexts[workload], workload, self.vocab)

    def logits(self, prompt: Sequence[int]) -> Floats:
        context = self.context(Workload(Phase.PREFILL, users=1, prompt=len(prompt), new=0), Tried(flash=True))
        last = len(prompt) - 1
        with batches([[(token, at, 0, at == last) for at, token in enumerate(prompt)]]) as steps:
            context.decode(steps)
        found = context.logits(last, self.vocab)
        context.close()
        return found

    def read(self, ids: IntArray, first: int) -> LogProbs:
        n = len(ids) - 1
        context = self.context(Workload(Phase.PREFILL, users=1, prompt=n, new=0), Tried(flash=True))
        with batches([[(int(token), at, 0, at >= first) for at, token in enumerate(ids[:-1])]]) as steps:
            context.decode(steps)
        rows = np.stack([context.logits(at, self.vocab) for at in range(first, n)])
        context.close()
        return log_softmax(rows)

    def context(self, workload: Workload, tried: "Tried") -> "Context":
        """Room for the whole workload; a context belongs to its model and must be closed before it."""
        p = llama_cpp.llama_context_default_params()
        p.n_seq_max, p.kv_unified = workload.users, False
        p.n_ctx = workload.users * -(-(workload.prompt + workload.new) // 256) * 256
        p.n_batch, p.n_ubatch = BATCH, tried.physical_batch
        p.n_threads = p.n_threads_batch = self._threads
        kinds = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        p.flash_attn_type = kinds[tried.flash]
        if self._cache is not None:
            p.type_k = p.type_v = self._cache
        context = llama_cpp.llama_init_from_model(self._model, p)
        if context is None:
            raise RuntimeError(f"llama.cpp gives no context for {workload.name}")
        return Context(context)

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        llama_cpp.llama_model_free(self._model)


class Context:
    """One llama_context. Batches are made before the clock starts: filling them from Python takes its time."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def keep(self, sequences: int, tokens: int) -> bool:
        """Drop what each sequence has beyond so many tokens; False: one has fewer."""
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in range(sequences):
            llama_cpp.llama_memory_seq_rm(memory, sequence, tokens, -1)
        return all(llama_cpp.llama_memory_seq_pos_max(memory, s) == tokens - 1 for s in range(sequences))

    def decode(self, batches: Iterable[Any]) -> None:
        """All computed when it returns."""
        for batch in batches:
            if failed := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode gave {failed}")
        llama_cpp.llama_synchronize(self._context)

    def logits(self, row: int, vocab: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Of the row-th token of the last batch."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (vocab,)).copy()

    def close(self) -> None:
        llama_cpp.llama_free(self._context)


@contextmanager
def batches(parts: Sequence[Sequence[Token]]) -> Iterator[list[Any]]:
    """A llama_batch for each part, of at most BATCH tokens."""
    made = [llama_cpp.llama_batch_init(len(part), 0, 1) for part in parts]
    for b, part in zip(made, parts, strict=True):
        b.n_tokens = len(part)
        for i, (token, position, sequence, wanted) in enumerate(part):
            b.token[i], b.pos[i], b.logits[i], b.n_seq_id[i] = token, position, wanted, 1
            b.seq_id[i][0] = sequence
    yield made
    for b in made:
        llama_cpp.llama_batch_free(b)


def _run(context: Context, w: Workload, vocab: int) -> float:
    rng = np.random.default_rng(0)
    prompt = [
        (token, position, sequence, position == w.prompt - 1)
        for sequence in range(w.users)
        for position, token in enumerate(rng.integers(0, vocab, w.prompt).tolist())
    ]
    drawn = rng.integers(0, vocab, (w.new, w.users)).tolist()
    steps = [[(token, w.prompt + i, s, True) for s, token in enumerate(row)] for i, row in enumerate(drawn)]
    with batches([prompt[at : at + BATCH] for at in range(0, len(prompt), BATCH)]) as first, batches(steps) as then:
        if w.phase is Phase.PREFILL:
            context.keep(w.users, 0)
            return seconds(lambda: context.decode(first))
        if not context.keep(w.users, w.prompt):  # the prompt of an earlier run is still there
            context.decode(first)
        return seconds(lambda: context.decode(then))
