"""StarCoder2 (arXiv:2402.19173): pre-norm decoder with LayerNorm, biases everywhere and an MLP without a gate."""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.decoder import Attention, CausalLM, build_norm
from millrace.model.layers import Linear
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class Starcoder2MLP(Module):
    def __init__(self, c: ModelConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.c_fc = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.c_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self._activation(self.c_fc(x)))


class Starcoder2Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = build_norm(c)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = build_norm(c)
        self.mlp = Starcoder2MLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class Starcoder2ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [Starcoder2Layer(c, layer) for layer in range(c.n_layers)], build_norm(c))
