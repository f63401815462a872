"""OpenVINO GenAI's pipeline on a GGUF file: the one given, or llama.cpp's copy in Q8_0 or float16.

As users of `LLMPipeline` see it, with its scheduler and sampler; nothing is detokenised. In the warm-up of each
workload its attention backends (PA with continuous batching, SDPA) and the types in which it computes are tried; what
was fastest is measured, and the result file has every setting with its seconds. Decode is timed from
the first step's tokens to the last's, as its own metrics tell them.
"""

import importlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.engine import Description, Floats, IntArray
from benchmarks.peers.timing import best_times, seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import MAX_USERS, Phase, Workload
from millrace.evaluate.divergence import LogProbs, log_softmax

BACKENDS = ("PA", "SDPA")
NOT_ROUNDED = 0  # a group of activations: where wider instruction sets are hidden, its plugin has no kernels for others
STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """hint: the type in which it computes what has no codes; None: as the plugin chooses"""

    backend: str
    hint: str | None = None
    dynamic_group: int | None = None  # of activations in 8 bits; None: as the plugin chooses

    def properties(self) -> dict[str, str]:
        own = {}
        if self.hint is not None:
            own["INFERENCE_PRECISION_HINT"] = self.hint
        if self.dynamic_group is not None:
            own["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(self.dynamic_group)
        return own


def prepare(weights: NamedWeights, variant: str, folder: Path) -> None:
    """The copy, and OpenVINO's model that the pipeline makes of it, whose logits the plain runtime gives."""
    kept = _folder(folder, variant)
    if (kept / "openvino_model.xml").exists():
        return
    assert weights.file is not None, "of a GGUF file alone"
    kept.mkdir(parents=True, exist_ok=True)
    file = kept / "model.gguf"
    if variant == "file":
        file.unlink(missing_ok=True)
        file.symlink_to(weights.file.absolute())
    elif not file.exists():
        copy = folder / f"llama-{variant.lower()}.gguf"
        if not copy.exists():
            raise RuntimeError(f"{copy.name} is not there: llama.cpp makes it, run llama.cpp-{variant.lower()} as well")
        file.symlink_to(copy.absolute())
    genai: Any = importlib.import_module("openvino_genai")
    genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)


def _folder(folder: Path, variant: str) -> Path:
    return folder / f"openvino-genai-{variant.lower()}"


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "GenAiEngine":
    """`variant`: "file", or the type of the copy"""
    return GenAiEngine(_folder(folder, variant), variant, weights, threads)


class GenAiEngine:
    def __init__(self, folder: Path, variant: str, weights: NamedWeights, threads: int) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._ov: Any = importlib.import_module("openvino")
        self._folder, self._variant, self._vocab = folder, variant, weights.config.vocab_size
        self._common = {"INFERENCE_NUM_THREADS": str(threads)}
        self._pipelines: dict[Setting, Any] = {}
        self._chosen: dict[Workload, Setting] = {}
        self._tried: dict[Workload, dict[Setting, float]] = {}
        self._failed: dict[Setting, str] = {}
        self._reader: Any = None
        self._pipeline(Setting(BACKENDS[0]))  # as a user's first line does

    def _pipeline(self, setting: Setting) -> Any:
        if setting not in self._pipelines:
            how: dict[str, Any] = {"ATTENTION_BACKEND": setting.backend, **self._common, **setting.properties()}
            if setting.backend == "PA":
                how["scheduler_config"] = self._scheduler()
            self._pipelines[setting] = self._genai.LLMPipeline(str(self._folder / "model.gguf"), "CPU", **how)
        return self._pipelines[setting]

    def _scheduler(self) -> Any:
        """The prompts of all users fit into one step, and no prompt is found again."""
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = STEP_TOKENS, MAX_USERS
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GiB
        return scheduler

    def describe(self) -> Description:
        size = (self._folder / "model.gguf").stat().st_size
        settings = {
            "hints": self._common, "isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
            "chosen": {w.name: asdict(s) for w, s in self._chosen.items()},
            "failed": [f"{s.backend} {s.properties()}: {why}" for s, why in self._failed.items()],
            "tried": {w.name: [{**asdict(s), "seconds": t} for s, t in of.items()] for w, of in self._tried.items()},
        }  # fmt: skip
        hints = sorted({s.hint or "its own choice" for s in self._chosen.values()})
        weights = {"file": "Q4_1, as its reader makes it", "Q8_0": "Q8_0, as its reader makes it", "F16": "fp16"}
        return Description(
            str(self._genai.__version__), weights=weights[self._variant], activations=" or ".join(hints),
            head="as the file's", kv="as its plugin chooses", weights_bytes=size, read_bytes_per_step=size,
            settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        tried = self._tried[workload] = {}
        first = [Setting(backend, None, group) for backend, group in itertools.product(BACKENDS, (None, NOT_ROUNDED))]
        best = self._fastest(first, workload, tried)
        others = [replace(best, hint="f32"), Setting(best.backend, "f32", 32)]
        best = self._fastest([best, *others], workload, tried)
        self._chosen[workload] = best
        self._keep(best)
        self._run(best, workload)

    def _fastest(self, settings: Sequence[Setting], workload: Workload, tried: dict[Setting, float]) -> Setting:
        for setting in settings:
            if setting not in tried and setting not in self._failed:
                try:
                    tried |= best_times([setting], lambda s: self._once(s, workload))
                except RuntimeError as error:  # what OpenVINO raises if its plugin has no such kernels here
                    self._failed[setting] = _last_line(error)
        ran = [s for s in settings if s in tried]
        if not ran:
            raise RuntimeError(f"OpenVINO GenAI runs in no setting: {'; '.join(self._failed.values())}")
        return min(ran, key=tried.__getitem__)

    def _once(self, setting: Setting, workload: Workload) -> float:
        self._keep(setting)
        return self._run(setting, workload)

    def _keep(self, setting: Setting) -> None:
        """Drops every other pipeline that no workload has chosen."""
        kept = {setting, *self._chosen.values()}
        self._pipelines = {s: pipeline for s, pipeline in self._pipelines.items() if s in kept}

    def run(self, workload: Workload) -> float:
        return self._run(self._chosen[workload], workload)

    def _run(self, setting: Setting, w: Workload) -> float:
        pipeline = self._pipeline(setting)
        ids = np.random.default_rng(0).integers(0, self._vocab, (w.users, w.prompt))
        inputs = self._genai.TokenizedInputs(self._ov.Tensor(ids), self._ov.Tensor(np.ones_like(ids)))
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = 1 + w.new, False, True
        if w.phase is Phase.PREFILL:
            return seconds(lambda: pipeline.generate(inputs, config))
        found: list[Any] = []
        whole = seconds(lambda: found.append(pipeline.generate(inputs, config)))
        if [len(tokens) for tokens in found[0].tokens] != [1 + w.new] * w.users:
            raise RuntimeError(f"OpenVINO GenAI gave other than {1 + w.new} tokens to {w.users} users")
        times_ms = list(found[0].perf_metrics.raw_metrics.m_new_token_times)
        if len(times_ms) != 1 + w.new or not 0 < times_ms[-1] - times_ms[0] < 1e3 * whole:
            raise RuntimeError(f"OpenVINO GenAI tells {len(times_ms)} steps in {whole} s, {1 + w.new} were asked")
        return float(times_ms[-1] - times_ms[0]) / 1e3

    def logits(self, prompt: Sequence[int]) -> Floats:
        row: Floats = self._rows(np.array([prompt]))[-1]
        return row

    def read(self, ids: IntArray, first: int) -> LogProbs:
        return log_softmax(self._rows(np.asarray(ids[None, :-1], np.int64))[first:])

    def _rows(self, ids: Any) -> Floats:
        """(tokens, vocabulary), in the types that were fastest for what was measured first."""
        if self._reader is None:
            setting = next(iter(self._chosen.values()))
            properties = {**self._common, **setting.properties()}
            model = self._ov.Core().compile_model(self._folder / "openvino_model.xml", "CPU", properties)
            self._reader = model.create_infer_request()
        self._reader.reset_state()
        n = ids.shape[1]
        self._reader.infer({
            "input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(n)[None],
            "beam_idx": np.zeros(1, np.int32),
        })  # fmt: skip
        rows: Floats = self._reader.get_output_tensor(0).data[0].astype(np.float32)
        return rows
