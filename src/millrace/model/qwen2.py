"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layers with a bias on q, k and v (`attention_bias` of the config)."""

from millrace.model.llama import LlamaForCausalLM as Qwen2ForCausalLM

__all__ = ["Qwen2ForCausalLM"]
