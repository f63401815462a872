"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783): pre-norm decoder, rotary positions, grouped queries, SwiGLU.

By their configuration also Mistral (windows), Qwen2 (biases), Qwen3 (norms of each query and key head), SmolLM3 (layers
without rotary positions), Granite (multipliers), StableLM (LayerNorm, rotation of a part of each head), Nemotron
(LayerNorm, squared ReLU), Cohere's Command R and R7B (attention and MLP side by side, interleaved rotation), and the
mixtures of experts of this shape: Mixtral, Qwen2 and Qwen3 MoE, OLMoE, Granite MoE, Phi-3.5-MoE, ERNIE 4.5, GLM-4.5.
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import MLP, Attention, CausalLM, GatedMLP, add_scaled, build_norm
from millrace.model.experts import ExpertMLP, block_name
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class LlamaLayer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self._is_parallel, self._multiplier = c.parallel_residual, c.residual_multiplier
        self.input_layernorm = build_norm(c)
        self.self_attn = Attention(c, layer)
        if not self._is_parallel:
            self.post_attention_layernorm = build_norm(c)
        self._mlp = block_name(c, layer)
        setattr(self, self._mlp, ExpertMLP(c) if c.has_experts(layer) else GatedMLP(c) if c.gated_mlp else MLP(c))

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        h = add_scaled(x, self.self_attn(normed, rotary, positions, lengths), self._multiplier)
        if not self._is_parallel:
            normed = self.post_attention_layernorm(h)
        return add_scaled(h, getattr(self, self._mlp)(normed), self._multiplier)


class LlamaForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [LlamaLayer(c, layer) for layer in range(c.n_layers)], build_norm(c))
