"""Mixtures of experts: each row passes through a few of many MLPs, which a router chooses (arXiv:2101.03961)."""

from dataclasses import dataclass

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.decoder import GatedMLP
from millrace.model.layers import Linear
from millrace.model.module import Module, ModuleList, Parameter
from millrace.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a family's parts in checkpoints: the block in a layer, and in the block.

    bias: of the choice of experts, under `bias_module`, which may be the router; "": of the block itself
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    bias_module: str = "gate"
    bias: str = "e_score_correction_bias"


_MIXTRAL = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
NAMES = {
    "mixtral": _MIXTRAL,
    "phimoe": _MIXTRAL,
    "granitemoe": ExpertNames(block="block_sparse_moe", router="router"),
    "qwen2_moe": ExpertNames(shared="shared_expert"),
    "gpt_oss": ExpertNames(router="router"),
    "ernie4_5_moe": ExpertNames(bias_module="moe_statics"),
    "lfm2_moe": ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2", bias_module="", bias="expert_bias"),
}


def block_name(c: ModelConfig, layer: int) -> str:
    """Return the name of a layer's MLP, which may be a mixture of experts."""
    return NAMES.get(c.family, ExpertNames()).block if c.has_experts(layer) else "mlp"


_PRECISE = "fp32"  # in every engine: a small error of a router would choose other experts


class Biases(Module):
    """Holds the bias of the choice of experts."""


class Expert(Module):
    """The weights of one expert, a gated MLP."""

    def __init__(self, c: ModelConfig, size: int, names: ExpertNames, *, bias: bool) -> None:
        for name, n_in, n_out in (
            (names.gate, c.hidden_size, size), (names.up, c.hidden_size, size), (names.down, size, c.hidden_size),
        ):  # fmt: skip
            setattr(self, name, Linear(n_in, n_out, bias=bias))


class ExpertMLP(Module):
    """The weighted sum of what a row's experts give, and what the shared MLP gives if there is one."""

    def __init__(self, c: ModelConfig) -> None:
        experts, names = c.experts, NAMES.get(c.family, ExpertNames())
        assert experts is not None, c
        self._names, self._config, self._activation = names, experts, ops.ACTIVATIONS[c.activation]
        setattr(self, names.router, Linear(c.hidden_size, experts.count, bias=experts.bias, precision=_PRECISE))
        if experts.selection_bias:
            if names.bias_module not in ("", names.router):
                setattr(self, names.bias_module, Biases())
            setattr(self._bias_module(), names.bias, Parameter(experts.count))
        self.experts = ModuleList([Expert(c, experts.size, names, bias=experts.bias) for _ in range(experts.count)])
        if experts.shared_size:
            setattr(self, names.shared, GatedMLP(c, experts.shared_size))
        if experts.shared_gate:
            self.shared_expert_gate = Linear(c.hidden_size, 1, precision=_PRECISE)

    def forward(self, x: Tensor) -> Tensor:
        names, experts = self._names, self._config
        bias = getattr(self._bias_module(), names.bias) if experts.selection_bias else None
        weights, chosen = ops.route(getattr(self, names.router)(x), experts.routing, bias)  # (T, A)
        row_of, places, starts = ops.group_by_expert(chosen, experts.count)
        grouped = ops.gather_rows(x, row_of)  # (T * A, hidden)
        gate, up = (self._product(grouped, starts, name) for name in (names.gate, names.up))
        y = ops.combine_experts(self._product(self._gated(gate, up), starts, names.down), places, weights)
        if not experts.shared_size:
            return y
        shared: Tensor = getattr(self, names.shared)(x)
        if experts.shared_gate:
            shared = ops.sigmoid(self.shared_expert_gate(x)) * shared
        return y + shared

    def _bias_module(self) -> Module:
        module: Module = getattr(self, self._names.bias_module) if self._names.bias_module else self
        return module

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._config.swiglu is None:
            return self._activation(gate) * up
        alpha, limit = self._config.swiglu
        gate, up = ops.minimum(gate, limit), ops.maximum(ops.minimum(up, limit), -limit)
        return (up + 1.0) * (gate * ops.sigmoid(gate * alpha))

    def _product(self, x: Tensor, starts: Tensor, name: str) -> Tensor:
        matrices = [getattr(expert, name) for expert in self.experts]
        biases = [matrix.bias for matrix in matrices] if self._config.bias else []
        return ops.expert_linear(x, starts, [matrix.weight for matrix in matrices], biases)
