"""Phi-1, 1.5 and 2 (arXiv:2309.05463): attention and MLP side by side behind one LayerNorm, biases everywhere."""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.decoder import Attention, CausalLM, build_norm
from millrace.model.layers import Linear
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class PhiMLP(Module):
    def __init__(self, c: ModelConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self._activation(self.fc1(x)))


class PhiLayer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = build_norm(c)
        self.self_attn = Attention(c, layer, output="dense")
        self.mlp = PhiMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        return x + self.self_attn(normed, rotary, positions, lengths) + self.mlp(normed)


class PhiForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        layers = [PhiLayer(c, layer) for layer in range(c.n_layers)]
        super().__init__(c, layers, build_norm(c), norm_name="final_layernorm")
