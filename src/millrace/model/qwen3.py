"""Qwen3 (arXiv:2505.09388): Llama's layers with an RMSNorm over each query and key head, before the rotation."""

from millrace.checkpoint.config import ModelConfig
from millrace.model.layers import RMSNorm
from millrace.model.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from millrace.model.tensor import Tensor


class Qwen3Attention(LlamaAttention):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


class Qwen3Layer(LlamaLayer):
    attention = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer = Qwen3Layer
