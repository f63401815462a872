"""Which tensors a file must have, and which parameters of a Hugging Face checkpoint each of them holds.

A tensor of the file may hold several parameters, as consecutive rows: the matrices of all experts, or q, k and v.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.gguf.architectures import LAYOUTS, Layout

Shape = tuple[int, ...]
_WITH_BIAS = {"attn_q": "q", "attn_k": "q", "attn_v": "q", "attn_output": "o"}


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of the checkpoint. heads: the number of heads whose rows were permuted; None: none were"""

    name: str
    shape: Shape
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the file: its name and shape there, and the parameters that it holds, in the order of their rows."""

    name: str
    shape: Shape
    parameters: tuple[HeldParameter, ...]
    plus_one: bool = False


def expected_tensors(c: ModelConfig, stored: Collection[str]) -> list[ExpectedTensor]:
    """Return the tensors of a file. stored: names in the file, which decide whether q, k and v are one tensor."""
    layout = LAYOUTS[c.family]
    result = [_single("token_embd.weight", "model.embed_tokens.weight", (c.vocab_size, c.hidden_size))]
    if not c.tie_embeddings:
        result.append(_single("output.weight", "lm_head.weight", (c.vocab_size, c.hidden_size)))
    if c.head_bias:
        result.append(_single("output.bias", "lm_head.bias", (c.vocab_size,)))
    in_file, in_checkpoint = layout.final_norm
    result += _norms(c, layout, in_file, f"model.{in_checkpoint}")
    for layer in range(c.n_layers):
        result += _joined(_layer(c, layout, layer), f"blk.{layer}.", stored)
    return result


def _layer(c: ModelConfig, layout: Layout, layer: int) -> Iterator[ExpectedTensor]:
    prefix, module = f"blk.{layer}.", f"model.layers.{layer}."
    for part, name in layout.layer.items():
        if part != "ffn_norm" or not c.parallel_residual:
            yield from _norms(c, layout, prefix + part, module + name)
    convolves = bool(c.convolves) and c.convolves[layer]
    shapes = _shapes(c, fused="ffn_gate" not in layout.mlp and c.gated_mlp)
    for part, name in (layout.convolution if convolves else layout.attention).items():
        if part.endswith("_norm"):
            if c.qk_norm:
                yield _norm(layout, prefix + part, module + name, shapes[part])
            continue
        heads = {"attn_q": c.n_heads, "attn_k": c.n_kv_heads}.get(part) if layout.permuted else None
        in_checkpoint = (c.hidden_size, 1, c.conv_taps) if part == "shortconv.conv" else shapes[part]
        parameter = HeldParameter(f"{module}{name}.weight", in_checkpoint, heads)
        yield ExpectedTensor(f"{prefix}{part}.weight", shapes[part], (parameter,))
        if part in _WITH_BIAS and (c.attention_bias if _WITH_BIAS[part] == "q" else c.attention_output_bias):
            bias = HeldParameter(f"{module}{name}.bias", shapes[part][:1], heads)
            yield ExpectedTensor(f"{prefix}{part}.bias", shapes[part][:1], (bias,))
    if c.has_experts(layer):
        yield from _experts(c, layout, prefix, module)
        return
    for part, name in layout.mlp.items():
        yield _single(f"{prefix}{part}.weight", f"{module}{name}.weight", shapes[part])
        if c.mlp_bias:
            yield _single(f"{prefix}{part}.bias", f"{module}{name}.bias", shapes[part][:1])


def _experts(c: ModelConfig, layout: Layout, prefix: str, module: str) -> Iterator[ExpectedTensor]:
    experts = c.experts
    assert experts is not None, c
    count, size, shared = experts.count, experts.size, experts.shared_size
    shapes: dict[str, Shape] = {
        "ffn_gate_inp": (count, c.hidden_size), "ffn_gate_exps": (count, size, c.hidden_size),
        "ffn_up_exps": (count, size, c.hidden_size), "ffn_down_exps": (count, c.hidden_size, size),
        "ffn_gate_shexp": (shared, c.hidden_size), "ffn_up_shexp": (shared, c.hidden_size),
        "ffn_down_shexp": (c.hidden_size, shared), "ffn_gate_inp_shexp": (c.hidden_size,),
    }  # fmt: skip
    for part, name in layout.experts.items():
        if part.endswith("_shexp") and not shared:
            continue
        shape = shapes[part]
        if part.endswith("_exps"):
            names = [f"{module}{name.replace('*', str(expert))}.weight" for expert in range(count)]
            parameters = tuple(HeldParameter(one, shape[1:]) for one in names)
        else:
            in_checkpoint = (1, c.hidden_size) if part == "ffn_gate_inp_shexp" else shape
            parameters = (HeldParameter(f"{module}{name}.weight", in_checkpoint),)
        yield ExpectedTensor(f"{prefix}{part}.weight", shape, parameters)
    if experts.selection_bias:
        yield _single(f"{prefix}exp_probs_b.bias", module + layout.selection_bias, (count,))


def _shapes(c: ModelConfig, *, fused: bool) -> Mapping[str, Shape]:
    """Return the shapes of a layer's matrices. fused: gate and up are one"""
    q, kv, hidden, inner = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    full = c.qk_norm == "full"
    return {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_qkv": (q + 2 * kv, hidden),
        "attn_output": (hidden, q), "attn_q_norm": (q if full else c.head_dim,),
        "attn_k_norm": (kv if full else c.head_dim,), "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if fused else inner, hidden), "ffn_down": (hidden, inner),
        "shortconv.conv": (hidden, c.conv_taps), "shortconv.in_proj": (3 * hidden, hidden),
        "shortconv.out_proj": (hidden, hidden),
    }  # fmt: skip


def _norms(c: ModelConfig, layout: Layout, part: str, module: str) -> Iterator[ExpectedTensor]:
    """Yield a norm of the residual stream: its weight, and its bias if the family has one."""
    yield _norm(layout, part, module, (c.hidden_size,))
    if c.norm in ("layer", "layer_offset"):
        yield _single(f"{part}.bias", f"{module}.bias", (c.hidden_size,))


def _norm(layout: Layout, part: str, module: str, shape: Shape) -> ExpectedTensor:
    parameter = HeldParameter(f"{module}.weight", shape)
    return ExpectedTensor(f"{part}.weight", shape, (parameter,), plus_one=layout.plus_one)


def _single(name: str, parameter: str, shape: Shape) -> ExpectedTensor:
    return ExpectedTensor(name, shape, (HeldParameter(parameter, shape),))


# Tensors that converters can write as one, by the name of that one. Rows of stacks alternate by expert.
_JOINED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


def _joined(tensors: Iterable[ExpectedTensor], prefix: str, stored: Collection[str]) -> list[ExpectedTensor]:
    """Replace tensors of a layer by the one that the file has in their place."""
    result = {tensor.name: tensor for tensor in tensors}
    for joint, parts in _JOINED.items():
        for end in ("weight", "bias"):
            name = f"{prefix}{joint}.{end}"
            of_parts = [result.get(f"{prefix}{part}.{end}") for part in parts]
            separate = [tensor for tensor in of_parts if tensor is not None]
            if name not in stored or len(separate) < len(parts):
                continue
            for tensor in separate:
                del result[tensor.name]
            axis = len(separate[0].shape) - 2 if end == "weight" else 0
            first = separate[0].shape
            shape = (*first[:axis], sum(t.shape[axis] for t in separate), *first[axis + 1 :])
            in_turn = zip(*(t.parameters for t in separate), strict=True)
            result[name] = ExpectedTensor(name, shape, tuple(one for turn in in_turn for one in turn))
    return list(result.values())
