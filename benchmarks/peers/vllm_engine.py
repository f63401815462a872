"""vLLM for CPU, in process, on the weights as a checkpoint in bfloat16, compiled as it is by default.

Through its own scheduler and sampler, as users of `LLM.generate` see it; nothing is detokenised. Decode is timed from
the step that gives the last of the first tokens to the end. Intel's OpenMP is loaded before anything else, as its
documentation asks, and tcmalloc where the system has it. Its cache of compiled code is empty at each start.
"""

import ctypes.util
import importlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.copies import copied
from benchmarks.peers.engine import Description, Floats, IntArray
from benchmarks.peers.timing import seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import MAX_USERS, Phase, Workload
from millrace.evaluate.divergence import LogProbs, log_softmax

CONTEXT = 1024  # of the longest workload here and more
STEP_TOKENS = 4096  # the prompts of all users fit into one step
_KINDS = {"bf16": "bfloat16", "fp32": "float32"}


def environment(home: Path) -> dict[str, str]:
    """What its process must have from its start: home's libraries are to be loaded first."""
    found = [home / "lib" / "libiomp5.so"]
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    preloaded = [str(path) for path in found if path.exists()] + ([tcmalloc] if tcmalloc else [])
    return {
        "LD_PRELOAD": ":".join(preloaded), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def prepare(weights: NamedWeights, variant: str, folder: Path) -> None:
    saved = folder / "safetensors-bf16"
    if not saved.exists():
        assert weights.file is not None, "of a GGUF file alone"
        unfinished = folder / "safetensors-bf16.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        copied(weights.file, unfinished, "bfloat16").rename(saved)
    shutil.rmtree(_cache(folder, variant), ignore_errors=True)


def _cache(folder: Path, variant: str) -> Path:
    return folder / f"vllm-cache-{variant}"


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "VllmEngine":
    """`variant`: in which numbers it computes, bf16 or fp32; the weights are bfloat16."""
    os.environ["VLLM_CACHE_ROOT"] = str(_cache(folder, variant).absolute())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((_cache(folder, variant) / "inductor").absolute())
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        _hide_wider()
    return VllmEngine(folder / "safetensors-bf16", variant, weights)


def _hide_wider() -> None:
    """vLLM asks PyTorch for the processor's instructions, which no variable changes, and takes a library by it."""
    cpu = importlib.import_module("torch.cpu")
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported",
                 "_is_amx_fp16_supported"):  # fmt: skip
        if hasattr(cpu, name):
            setattr(cpu, name, lambda: False)


class VllmEngine:
    def __init__(self, folder: Path, variant: str, weights: NamedWeights) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._vllm, self._variant, self._vocab = vllm, variant, weights.config.vocab_size
        self._arguments: dict[str, Any] = {
            "dtype": _KINDS[variant], "max_model_len": CONTEXT, "max_num_seqs": MAX_USERS,
            "max_num_batched_tokens": STEP_TOKENS, "enable_prefix_caching": False,
        }  # fmt: skip
        self._llm = vllm.LLM(str(folder), skip_tokenizer_init=True, **self._arguments)
        self._bytes = (folder / "model.safetensors").stat().st_size * (2 if variant == "fp32" else 1)

    def describe(self) -> Description:
        kept = ("LD_PRELOAD", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
        loaded = {name: os.environ[name] for name in kept if name in os.environ}
        if "LD_PRELOAD" in loaded:
            loaded["LD_PRELOAD"] = ", ".join(Path(path).name for path in loaded["LD_PRELOAD"].split(":"))
        settings = {**self._arguments, "variables": loaded, "torch": importlib.import_module("torch").__version__}
        kind = self._variant
        return Description(
            str(self._vllm.__version__), weights=kind, activations=kind, head=kind, kv=kind, weights_bytes=self._bytes,
            read_bytes_per_step=self._bytes, settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        self.run(workload)

    def run(self, workload: Workload) -> float:
        w = workload
        ids = np.random.default_rng(0).integers(0, self._vocab, (w.users, w.prompt)).tolist()
        if w.phase is Phase.PREFILL:
            return seconds(lambda: self._generate(ids, 1))
        return self._generate(ids, 1 + w.new)

    def _generate(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds from the first token of the last prompt to the end."""
        engine = self._llm.llm_engine
        params = self._vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": [*prompt]}, params)
        begun: dict[str, int] = {}
        first = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                begun[output.request_id] = len(output.outputs[0].token_ids)
            if first is None and len(begun) == len(prompts):
                first = time.perf_counter()
        ended = time.perf_counter()
        if first is None or set(begun.values()) != {new}:
            raise RuntimeError(f"vLLM gave {sorted(begun.values())} tokens, {len(prompts)} times {new} were asked")
        return ended - first

    def logits(self, prompt: Sequence[int]) -> Floats:
        row: Floats = self._rows(prompt, every=False)[-1]
        return row

    def read(self, ids: IntArray, first: int) -> LogProbs:
        rows = self._rows([int(i) for i in ids], every=True)
        return log_softmax(rows[first : len(ids) - 1])

    def _rows(self, prompt: Sequence[int], *, every: bool) -> Floats:
        """(tokens or 1, vocabulary): what its head gives while a prompt is read, which its interface gives as lists."""
        model = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        found: list[Floats] = []
        head = model.compute_logits

        def kept(*args: Any, **more: Any) -> Any:
            logits = head(*args, **more)
            found.append(logits.float().numpy().copy())
            return logits

        model.compute_logits = kept
        try:
            params = self._vllm.SamplingParams(
                temperature=0, max_tokens=1, detokenize=False, **({"prompt_logprobs": 1} if every else {})
            )
            self._llm.generate([{"prompt_token_ids": [*prompt]}], params, use_tqdm=False)
        finally:
            model.compute_logits = head
        rows: Floats = max(found, key=len) if every else found[-1]
        return rows
