"""Gemma (arXiv:2403.08295): GeGLU, norms that store weight - 1, embeddings scaled by sqrt(hidden), a tied head."""

from millrace.checkpoint.config import ModelConfig
from millrace.model.llama import LlamaForCausalLM, LlamaLayer


class GemmaLayer(LlamaLayer):
    norm_offset = 1.0


class GemmaForCausalLM(LlamaForCausalLM):
    layer = GemmaLayer

    def embedding_scale(self, c: ModelConfig) -> float:
        return float(c.hidden_size**0.5)
