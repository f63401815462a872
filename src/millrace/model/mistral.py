"""Mistral 7B (arXiv:2310.06825): Llama's layers, each with attention over a window (`windows` of the config)."""

from millrace.model.llama import LlamaForCausalLM as MistralForCausalLM

__all__ = ["MistralForCausalLM"]
