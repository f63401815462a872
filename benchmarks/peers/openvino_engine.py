"""OpenVINO's CPU plugin on 4-bit weights, in process, set up as it is fastest.

The plain runtime rather than the server parts of OpenVINO GenAI: a stateful model, all users in one batch of equal
lengths, which leaves nothing to schedule. 8-bit dynamically quantised activations in two group sizes and bfloat16 ones
are tried in the warm-up: what was faster is measured, and the result file says what it was. Otherwise its own defaults,
among them an 8-bit KV cache.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from benchmarks.peers import openvino_ir
from benchmarks.peers.engine import Description
from benchmarks.peers.timing import fastest, seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Phase, Workload
from millrace.checkpoint.config import ModelConfig

Tokens = NDArray[np.int64]  # (users, tokens)


@dataclass(frozen=True, slots=True)
class Setting:
    """float32: products whose weights are quantised take 8-bit activations, one scale for `dynamic_group` of them."""

    activations: str
    dynamic_group: int

    def properties(self) -> dict[str, str]:
        return {
            "INFERENCE_PRECISION_HINT": self.activations,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(self.dynamic_group),
        }


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "OpenVinoEngine":
    path = folder / f"openvino-{variant}.xml"
    if not path.exists():
        openvino_ir.write_ir(path, weights, variant)
    return OpenVinoEngine(path, weights.config, threads)


class OpenVinoEngine:
    """The model compiled once for each setting."""

    def __init__(self, path: Path, config: ModelConfig, threads: int) -> None:
        self._path, self._config = path, config
        group = openvino_ir.group_of(config.hidden_size)
        self._settings = [Setting("f32", g) for g in sorted({32, group})] + [Setting("bf16", group)]
        common = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads)}
        self._models = {s: CompiledModel(path, {**common, **s.properties()}) for s in self._settings}
        self._chosen: dict[Workload, Setting] = {}

    def describe(self) -> Description:
        c = self._config
        total = self._path.with_suffix(".bin").stat().st_size
        looked_up = 0 if c.tie_embeddings else c.vocab_size * (c.hidden_size + 2)  # 8 bits each and a scale
        settings = {
            "weights": f"int4 symmetric, groups of {openvino_ir.group_of(c.hidden_size)}; embedding and head int8",
            "chosen": {w.name: asdict(s) for w, s in self._chosen.items()},
        }
        groups = sorted({s.dynamic_group for s in self._chosen.values()})
        return Description(
            ov.__version__, weights=f"int4, groups of {openvino_ir.group_of(c.hidden_size)}",
            activations=" or ".join(f"int8, groups of {g}" if g else "floats" for g in groups), head="int8 by output",
            kv="as its plugin chooses", weights_bytes=total, read_bytes_per_step=total - looked_up, settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        self._chosen[workload] = fastest(self._settings, lambda s: self._run(self._models[s], workload))

    def run(self, workload: Workload) -> float:
        return self._run(self._models[self._chosen[workload]], workload)

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
        users, n = tokens.shape
        positions = np.broadcast_to(np.arange(at, at + n), (users, n))
        inputs = {"input_ids": tokens, "position_ids": positions, "beam_idx": np.arange(users, dtype=np.int32)}
        self._request.infer(inputs, share_inputs=True)
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data[:, -1]
        return logits
