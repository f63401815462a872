"""Mistral 7B (arXiv:2310.06825): Llama's layers. Its sliding window is kept by capping the context at it."""

from millrace.model.llama import LlamaForCausalLM as MistralForCausalLM

__all__ = ["MistralForCausalLM"]
