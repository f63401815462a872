"""transformers on PyTorch for CPU: bfloat16 through oneDNN, scaled dot product attention, its own growing KV cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.engine import Description, Floats
from benchmarks.peers.timing import seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Phase, Workload
from millrace.checkpoint.config.model_config import ModelConfig


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "TransformersEngine":
    """`variant`: bf16. The weights are kept as a Hugging Face checkpoint, also for other tools to read."""
    saved = folder / f"hugging-face-{variant}"
    if not saved.exists():
        save_checkpoint(weights, saved)
    torch.set_num_threads(threads)
    return TransformersEngine(transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16))


def save_checkpoint(weights: NamedWeights, folder: Path) -> None:
    """A checkpoint folder in bfloat16, written by transformers."""
    config = transformers.AutoConfig.for_model(weights.config.family, **_keys(weights.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights.load(name)))
    model.save_pretrained(folder)


class TransformersEngine:
    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._caches: dict[Workload, Any] = {}  # with the prompt, which decode does not count

    def describe(self) -> Description:
        sizes = {n: p.numel() * p.element_size() for n, p in self._model.named_parameters()}
        looked_up = sizes["model.embed_tokens.weight"] if "lm_head.weight" in sizes else 0
        settings = {"torch": torch.__version__, "attention": self._model.config._attn_implementation}
        total = sum(sizes.values())
        return Description(
            transformers.__version__, weights="bf16", activations="bf16", head="bf16", kv="bf16", weights_bytes=total,
            read_bytes_per_step=total - looked_up, settings=settings,
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        self.run(workload)

    def run(self, workload: Workload) -> float:
        with torch.inference_mode():
            return self._run(workload)

    def logits(self, prompt: Sequence[int]) -> Floats:
        with torch.inference_mode():
            found = self._model(input_ids=torch.tensor([prompt]), logits_to_keep=1).logits
        row: Floats = found[0, -1].float().numpy()
        return row

    def _run(self, w: Workload) -> float:
        vocab = self._model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(vocab, (w.users, w.prompt), generator=generator)
        if w.phase is Phase.PREFILL:
            return seconds(lambda: self._step(prompt, None))
        if w not in self._caches:
            self._caches[w] = self._step(prompt, None)
        cache = self._caches[w]
        if beyond := cache.get_seq_length() - w.prompt:
            cache.crop(-beyond)
        drawn = torch.randint(vocab, (w.new, w.users, 1), generator=generator)
        return seconds(lambda: [self._step(tokens, cache) for tokens in drawn])

    def _step(self, tokens: torch.Tensor, cache: Any) -> Any:
        """The cache, which holds these tokens as well; logits of the last one only."""
        return self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values


def _keys(c: ModelConfig) -> dict[str, Any]:
    """config.json of a model whose rotary positions are not scaled."""
    assert c.rope.kind == "default"
    keys: dict[str, Any] = {
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "max_position_embeddings": c.max_context, "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope.theta},
        "tie_word_embeddings": c.tie_embeddings, "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
    }  # fmt: skip
    return keys
