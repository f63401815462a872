"""OpenVINO's CPU plugin on 4-bit weights, in process, set up as it is fastest.

The plain runtime rather than the server parts of OpenVINO GenAI: a stateful model, all users in one batch of equal
lengths, which leaves nothing to schedule. In the warm-up of each workload one setting after the other is tried, first
the activations (8 bits, dynamically quantised in groups of 32 up to whole tokens, or bfloat16), then where threads run,
then the KV cache: what was fastest is measured, and the result file has every setting with its seconds. "int4@128" has
its activations in 8 bits and groups of 128, as ours have them, and only the rest is chosen: speed at equal groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from benchmarks.peers import openvino_ir
from benchmarks.peers.engine import Description, Floats
from benchmarks.peers.timing import best_times, seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Phase, Workload
from millrace.checkpoint.config.model_config import ModelConfig

Tokens = NDArray[np.int64]  # (users, tokens)


PER_TOKEN = 2**64 - 1
KV_KINDS = ("u8", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Setting:
    """float32: products whose weights are quantised take 8-bit activations, one scale for `dynamic_group` of them.

    pinned: whether its threads stay on their cores; kv: the type of keys and values; None: as the plugin chooses
    """

    activations: str
    dynamic_group: int
    pinned: bool | None = None
    kv: str | None = None

    def properties(self) -> dict[str, str]:
        own = {
            "INFERENCE_PRECISION_HINT": self.activations,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(self.dynamic_group),
        }
        if self.pinned is not None:
            own["ENABLE_CPU_PINNING"] = "YES" if self.pinned else "NO"
        if self.kv is not None:
            own["KV_CACHE_PRECISION"] = self.kv
        return own

    @property
    def told(self) -> str:
        """What its activations are."""
        if self.activations != "f32":
            return self.activations
        return "int8, a token each" if self.dynamic_group == PER_TOKEN else f"int8, groups of {self.dynamic_group}"


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "OpenVinoEngine":
    """`variant`: kind of weights, or kind@group of the activations in 8 bits."""
    kind, _, group = variant.partition("@")
    path = folder / f"openvino-{kind}.xml"
    if not path.exists():
        openvino_ir.write_ir(path, weights, kind)
    return OpenVinoEngine(path, weights.config, threads, int(group) if group else None)


class OpenVinoEngine:
    """The model compiled for the settings that were chosen: all that are tried of a large one would fill the memory."""

    def __init__(self, path: Path, config: ModelConfig, threads: int, x_group: int | None = None) -> None:
        """x_group: of the activations, in 8 bits; None: whichever is fastest"""
        self._path, self._config = path, config
        group = openvino_ir.group_of(config.hidden_size)
        self._activations = [Setting("f32", g) for g in ([x_group] if x_group else sorted({32, group, PER_TOKEN}))]
        if not x_group:
            self._activations.append(Setting("bf16", group))
        self._common = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads)}
        self._models: dict[Setting, CompiledModel] = {}
        self._chosen: dict[Workload, Setting] = {}
        self._tried: dict[Workload, dict[Setting, float]] = {}  # seconds

    def compiled(self, setting: Setting) -> "CompiledModel":
        """Once for each setting that is kept."""
        if setting not in self._models:
            self._models[setting] = CompiledModel(self._path, {**self._common, **setting.properties()})
        return self._models[setting]

    def describe(self) -> Description:
        c = self._config
        total = self._path.with_suffix(".bin").stat().st_size
        looked_up = 0 if c.tie_embeddings else c.vocab_size * (c.hidden_size + 2)  # 8 bits each and a scale
        settings = {
            "weights": f"{self._kind}, groups of {openvino_ir.group_of(c.hidden_size)}; embedding and head int8",
            "hints": self._common,
            "chosen": {w.name: asdict(s) for w, s in self._chosen.items()},
            "tried": {w.name: [{**asdict(s), "seconds": t} for s, t in of.items()] for w, of in self._tried.items()},
        }
        return Description(
            ov.__version__, weights=f"{self._kind}, groups of {openvino_ir.group_of(c.hidden_size)}",
            activations=" or ".join(sorted({s.told for s in self._chosen.values()})), head="int8 by output",
            kv="as its plugin chooses", weights_bytes=total, read_bytes_per_step=total - looked_up, settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        """One choice after the other, each from what was fastest so far; then what was chosen, which trying the others
        has dropped: a counted run compiles nothing."""
        tried = self._tried[workload] = {}
        best = self._fastest(self._activations, workload, tried)
        best = self._fastest([best, replace(best, pinned=True), replace(best, pinned=False)], workload, tried)
        best = self._fastest([best, *(replace(best, kv=kind) for kind in KV_KINDS)], workload, tried)
        self._chosen[workload] = best
        self._keep(best)
        self.run(workload)

    def _fastest(self, settings: Sequence[Setting], workload: Workload, tried: dict[Setting, float]) -> Setting:
        """Adds to `tried`; what was tried before is not tried again."""
        tried |= best_times((s for s in settings if s not in tried), lambda s: self._once(s, workload))
        return min(settings, key=tried.__getitem__)

    def _once(self, setting: Setting, workload: Workload) -> float:
        self._keep(setting)
        return self._run(self.compiled(setting), workload)

    def _keep(self, setting: Setting) -> None:
        """Drops every other model that no workload has chosen."""
        kept = {setting, *self._chosen.values()}
        self._models = {s: model for s, model in self._models.items() if s in kept}

    def run(self, workload: Workload) -> float:
        return self._run(self.compiled(self._chosen[workload]), workload)

    def logits(self, prompt: Sequence[int]) -> Floats:
        """Of the setting that is fastest at what was measured first."""
        model = self.compiled(next(iter(self._chosen.values()), self._activations[0]))
        model.reset()
        row: Floats = model.step(np.array([prompt]), 0)[0].copy()
        return row

    @property
    def _kind(self) -> str:
        return "int4, asymmetric" if "asym" in self._path.stem else "int4"

    def _run(self, model: "CompiledModel", w: Workload) -> float:
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, self._config.vocab_size, (w.users, w.prompt))
        drawn = rng.integers(0, self._config.vocab_size, (w.new, w.users, 1))
        model.reset()
        if w.phase is Phase.PREFILL:
            return seconds(lambda: model.step(prompt, 0))
        model.step(prompt, 0)
        return seconds(lambda: [model.step(tokens, w.prompt + i) for i, tokens in enumerate(drawn)])


class CompiledModel:
    """One compiled model with the KV cache of one batch."""

    def __init__(self, path: Path, properties: Mapping[str, str]) -> None:
        self._request = ov.Core().compile_model(path, "CPU", dict(properties)).create_infer_request()

    def reset(self) -> None:
        self._request.reset_state()

    def step(self, tokens: Tokens, at: int) -> NDArray[np.float32]:
        """The logits (users, vocabulary) behind the last token; `at`: how many tokens each sequence has already."""
        return self.logits(tokens, at)[:, -1]

    def logits(self, tokens: Tokens, at: int) -> NDArray[np.float32]:
        """(users, T, vocabulary), a view until the next step: T is 1 but of a model written for every token."""
        users, n = tokens.shape
        positions = np.broadcast_to(np.arange(at, at + n), (users, n))
        inputs = {"input_ids": tokens, "position_ids": positions, "beam_idx": np.arange(users, dtype=np.int32)}
        self._request.infer(inputs, share_inputs=True)
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits
