"""The supported architectures of GGUF files: the family of each, and the names and order of its tensors.

Names of tensors follow llama.cpp's `gguf` package (gguf/constants.py), changes of rows and values its converter
(convert_hf_to_gguf.py). A family that shares another's names has a line, not a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Names = Mapping[str, str]  # part of a layer in the file -> module of a layer in Hugging Face's checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How files store the parameters of a family.

    layer: parts of every layer; attention, mlp, convolution, experts: of layers that have them
    mlp: fused if there is no ffn_gate and the family's MLP has a gate
    experts: `*` in a module's name is the expert's number
    selection_bias: the name of the bias of the choice of experts
    permuted: rows of q and k are stored in the order of adjacent pairs, though the checkpoint rotates halves
    plus_one: 1 was added to the weights of norms
    final_norm: the last norm, in the file and in the checkpoint
    """

    layer: Names
    attention: Names
    mlp: Names
    experts: Names = field(default_factory=dict)
    convolution: Names = field(default_factory=dict)
    selection_bias: str = ""
    permuted: bool = False
    plus_one: bool = False
    final_norm: tuple[str, str] = ("output_norm", "norm")


# Supported values of general.architecture, and the families' names. Mistral's files say llama.
ARCHITECTURES: Names = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "smollm3": "smollm3", "granite": "granite", "ernie4_5": "ernie4_5", "phi2": "phi", "phi3": "phi3",
    "olmo2": "olmo2", "exaone4": "exaone4", "chatglm": "glm", "glm4": "glm4", "stablelm": "stablelm",
    "nemotron": "nemotron", "starcoder2": "starcoder2", "command-r": "cohere", "cohere2": "cohere2", "lfm2": "lfm2",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "granitemoe": "granitemoe",
    "phimoe": "phimoe", "ernie4_5-moe": "ernie4_5_moe", "glm4moe": "glm4_moe",
}  # fmt: skip
WITH_EXPERTS: Names = {"llama": "mixtral"}  # the family if the file has experts
WITH_WINDOWS: Names = {"olmo2": "olmo3"}  # the family if the file has a sliding window

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
_QK_NORM = {**_ATTENTION, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def _experts(block: str = "mlp", router: str = "gate", gate: str = "gate_proj", up: str = "up_proj",
             down: str = "down_proj", shared: str = "") -> dict[str, str]:  # fmt: skip
    names = {
        "ffn_gate_inp": f"{block}.{router}", "ffn_gate_exps": f"{block}.experts.*.{gate}",
        "ffn_up_exps": f"{block}.experts.*.{up}", "ffn_down_exps": f"{block}.experts.*.{down}",
    }  # fmt: skip
    if shared:
        names |= {f"ffn_{part}_shexp": f"{block}.{shared}.{part}_proj" for part in ("gate", "up", "down")}
    return names


_MIXTRAL = _experts("block_sparse_moe", gate="w1", up="w3", down="w2")
_LLAMA = Layout(layer=_NORMS, attention=_ATTENTION, mlp=_MLP)
_QWEN3 = Layout(layer=_NORMS, attention=_QK_NORM, mlp=_MLP)
_GEMMA_NORMS = {**_POST_NORMS, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GLM4_NORMS = {**_NORMS, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}

LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(layer=_NORMS, attention=_ATTENTION, mlp=_MLP, permuted=True),
    "smollm3": Layout(layer=_NORMS, attention=_ATTENTION, mlp=_MLP, permuted=True),
    "granite": Layout(layer=_NORMS, attention=_ATTENTION, mlp=_MLP, permuted=True),
    "qwen2": _LLAMA,
    "ernie4_5": _LLAMA,
    "stablelm": _LLAMA,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "qwen3": _QWEN3,
    "gemma": Layout(layer=_NORMS, attention=_ATTENTION, mlp=_MLP, plus_one=True),
    "gemma2": Layout(layer=_GEMMA_NORMS, attention=_ATTENTION, mlp=_MLP, plus_one=True),
    "gemma3_text": Layout(layer=_GEMMA_NORMS, attention=_QK_NORM, mlp=_MLP, plus_one=True),
    "nemotron": Layout(
        layer=_NORMS, attention=_ATTENTION, mlp={"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}, plus_one=True
    ),
    "olmo2": Layout(layer=_POST_NORMS, attention=_QK_NORM, mlp=_MLP),
    "olmo3": Layout(layer=_POST_NORMS, attention=_QK_NORM, mlp=_MLP),
    "exaone4": Layout(layer=_POST_NORMS, attention=_QK_NORM, mlp=_MLP),
    "glm": Layout(layer=_NORMS, attention=_ATTENTION, mlp=_FUSED_MLP),
    "glm4": Layout(layer=_GLM4_NORMS, attention=_ATTENTION, mlp=_FUSED_MLP),
    "phi3": Layout(
        layer=_NORMS, attention={"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}, mlp=_FUSED_MLP
    ),
    "phi": Layout(
        layer={"attn_norm": "input_layernorm"}, attention={**_ATTENTION, "attn_output": "self_attn.dense"},
        mlp={"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, final_norm=("output_norm", "final_layernorm"),
    ),
    "starcoder2": Layout(layer=_NORMS, attention=_ATTENTION, mlp={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "lfm2": Layout(
        layer={"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
        attention={
            **_ATTENTION, "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
        },
        mlp={"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
        convolution={
            "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
        },
        final_norm=("token_embd_norm", "embedding_norm"),
    ),
    "mixtral": Layout(layer=_NORMS, attention=_ATTENTION, mlp={}, experts=_MIXTRAL, permuted=True),
    "phimoe": Layout(layer=_NORMS, attention=_ATTENTION, mlp={}, experts=_MIXTRAL),
    "granitemoe": Layout(
        layer=_NORMS, attention=_ATTENTION, mlp={}, experts=_experts("block_sparse_moe", router="router"), permuted=True
    ),
    "qwen2_moe": Layout(
        layer=_NORMS, attention=_ATTENTION, mlp=_MLP,
        experts={**_experts(shared="shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    ),
    "qwen3_moe": Layout(layer=_NORMS, attention=_QK_NORM, mlp=_MLP, experts=_experts()),
    "olmoe": Layout(layer=_NORMS, attention=_QK_NORM, mlp={}, experts=_experts()),
    "ernie4_5_moe": Layout(
        layer=_NORMS, attention=_ATTENTION, mlp=_MLP, experts=_experts(shared="shared_experts"),
        selection_bias="mlp.moe_statics.e_score_correction_bias",
    ),
    "glm4_moe": Layout(
        layer={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        attention=_QK_NORM, mlp=_MLP, experts=_experts(shared="shared_experts"),
        selection_bias="mlp.gate.e_score_correction_bias",
    ),
}  # fmt: skip
