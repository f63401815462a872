"""The network of `tiny`: Llama (arXiv:2302.13971) with grouped-query attention, in plain PyTorch.

Written out rather than imported so that the recipe shows the whole model, and so that packed training sequences can
carry a document mask. The parameters have exactly the names of transformers' `LlamaForCausalLM`, so an export is
`state_dict()` and nothing else; a test compares the logits of the two.

Letters: B sequences, T tokens, D width, H query heads, K key/value heads, E head size, V vocabulary.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Sizes of the network; the defaults are the bundled model (4.0 M parameters)."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    ffn: int = 640
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def to_hf(self, *, bos: int, eos: list[int], pad: int, dtype: str) -> dict[str, object]:
        """config.json as transformers writes it for LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": pad,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.vocab,
        }

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def rope_tables(length: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T, E) of RoPE (arXiv:2104.09864), the two halves of a head rotated against each other."""
    rate = theta ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)  # (E/2)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rate  # (T, E/2)
    angle = torch.cat([angle, angle], dim=-1)  # (T, E)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, E) turned by its position."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class RMSNorm(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """x / rms(x) * weight, in float32 whatever the input's precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, (B, H, T, E) each; causal without a mask.

    On a CPU PyTorch's fused attention takes twice as long, forward and backward, as writing a short T's scores down.
    """
    if mask is None or q.device.type != "cpu" or q.shape[2] > 512:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    with torch.autocast("cpu", enabled=False):  # it would take the softmax in float32, through four more passes
        closed = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -1e9)  # (B, 1, T, T)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # (B, H, T, T)
        return torch.softmax(scores + closed, dim=-1) @ v


class Attention(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """Causal self-attention with fewer key/value heads than query heads (arXiv:2305.13245)."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj = nn.Linear(cfg.hidden, cfg.heads * cfg.head_size, bias=False)
        self.k_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_size, bias=False)
        self.v_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_size, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_size, cfg.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        E, group = self.cfg.head_size, self.cfg.heads // self.cfg.kv_heads
        q = rotate(self.q_proj(x).view(B, T, -1, E).transpose(1, 2), *rope)  # (B, H, T, E)
        k = rotate(self.k_proj(x).view(B, T, -1, E).transpose(1, 2), *rope)  # (B, K, T, E)
        v = self.v_proj(x).view(B, T, -1, E).transpose(1, 2)  # (B, K, T, E)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (B, H, T, E)
        q, k = q.to(v.dtype), k.to(v.dtype)  # RoPE is in float32 also where the products are in bfloat16
        y = attend(q, k, v, mask)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.hidden, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """One layer: attention, then MLP, each after its norm and added to the stream."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """Embedding, layers and last norm; named `model` in the checkpoint."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.hidden)
        self.layers = nn.ModuleList([Block(cfg) for _ in range(cfg.layers)])
        self.norm = RMSNorm(cfg.hidden, cfg.norm_eps)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed_tokens(tokens)  # (B, T, D)
        rope = rope_tables(tokens.shape[1], self.cfg.head_size, self.cfg.rope_theta, tokens.device)
        for layer in self.layers:
            x = layer(x, rope, mask)
        out: Tensor = self.norm(x)
        return out


class TinyLlama(nn.Module):  # type: ignore[misc]  # PyTorch is untyped to us
    """Tokens to logits; the head is the embedding."""

    def __init__(self, cfg: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Trunk(cfg)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                out_of_block = name.endswith(("o_proj.weight", "down_proj.weight"))
                # GPT-2's rule: what is added to the stream 2*layers times starts that much smaller
                std = 0.02 if "embed" in name else p.shape[1] ** -0.5 / ((2 * cfg.layers) ** 0.5 if out_of_block else 1)
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V); `mask` (B, 1, T, T) is true where attention is allowed."""
        return functional.linear(self.model(tokens, mask), self.model.embed_tokens.weight)


def document_mask(documents: Tensor) -> Tensor:
    """documents (B, T), a number per packed document -> (B, 1, T, T): causal, and never across documents."""
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
