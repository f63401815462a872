"""Reads the keys of config.json that describe a model's experts."""

from dataclasses import dataclass

from millrace.checkpoint.config.config_reader import ConfigReader, wrong
from millrace.checkpoint.config.families.family import ExpertScheme
from millrace.checkpoint.config.routing import Routing

MAX_EXPERTS, MAX_CHOSEN = 1024, 64  # as in kernels/route


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The experts of a decoder.

    layers: whether each layer has experts instead of one MLP
    size: width of an expert's MLP; shared_size: of the MLP for all rows beside them, 0: there is none
    shared_gate: the result of the shared MLP is times the sigmoid of a product of its own
    selection_bias: the choice of experts has a bias
    bias: the router and all products of experts have biases
    swiglu: of experts that compute (up + 1) * gate * sigmoid(alpha * gate), with gate and up bounded: alpha, and the
        bound; None: activation(gate) * up
    """

    count: int
    size: int
    routing: Routing
    layers: tuple[bool, ...]
    shared_size: int = 0
    shared_gate: bool = False
    selection_bias: bool = False
    bias: bool = False
    swiglu: tuple[float, float] | None = None


def read_experts(read: ConfigReader, n_layers: int) -> ExpertConfig | None:
    """Return the experts; None if the family has none, or no layer of this model. raises CheckpointError"""
    scheme = read.family.experts
    if scheme is None:
        return None
    layers = _layers(read, scheme, n_layers)
    if not any(layers):
        return None
    count = read.positive_int(scheme.count, high=MAX_EXPERTS)
    chosen = read.positive_int(scheme.chosen, high=min(MAX_CHOSEN, count))
    size = read.positive_int(scheme.size)
    return ExpertConfig(
        count=count, size=size, routing=_routing(read, scheme, count, chosen), layers=layers,
        shared_size=_shared_size(read, scheme, size), shared_gate=read.family.name == "qwen2_moe",
        selection_bias=read.boolean(scheme.bias) if isinstance(scheme.bias, str) else scheme.bias,
        bias=read.family.name == "gpt_oss", swiglu=_swiglu(read),
    )  # fmt: skip


def _routing(read: ConfigReader, scheme: ExpertScheme, count: int, chosen: int) -> Routing:
    normalise = read.boolean("norm_topk_prob") if scheme.normalise is None else scheme.normalise
    epsilon = scheme.epsilon
    if scheme.scoring == "sparsemixer":
        epsilon = 2 * read.positive_float("router_jitter_noise")
        if chosen != 2:
            raise wrong(scheme.chosen, chosen, "2: its routing is defined for two experts")
    scale = read.positive_float("routed_scaling_factor") if "routed_scaling_factor" in read.family.defaults else 1.0
    groups = chosen_groups = group_best = 1
    if "n_group" in read.family.defaults:
        groups, chosen_groups = read.positive_int("n_group"), read.positive_int("topk_group")
        if count % groups:
            raise wrong("n_group", groups, f"a divisor of the {count} experts")
        if chosen_groups > groups or chosen_groups * (count // groups) < chosen:
            raise wrong("topk_group", chosen_groups, f"at most {groups} groups, that have {chosen} experts or more")
        group_best = min(2, count // groups)
    return Routing(
        chosen=chosen, scoring=scheme.scoring, normalise=normalise, scale=scale, epsilon=epsilon, groups=groups,
        chosen_groups=chosen_groups, group_best=group_best,
    )  # fmt: skip


def _swiglu(read: ConfigReader) -> tuple[float, float] | None:
    if "swiglu_limit" not in read.family.defaults:
        return None
    return read.positive_float("swiglu_alpha"), read.positive_float("swiglu_limit")


def _shared_size(read: ConfigReader, scheme: ExpertScheme, size: int) -> int:
    if not scheme.shared:
        return 0
    value = read.get(scheme.shared)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return 0
    number = read.positive_int(scheme.shared)
    return number if scheme.shared.endswith("_size") else number * size


def _layers(read: ConfigReader, scheme: ExpertScheme, n_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts, as transformers' models decide it."""
    numbers = range(n_layers)
    if scheme.layers == "qwen":
        dense, step = read.get("mlp_only_layers") or [], read.positive_int("decoder_sparse_step")
        if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < n_layers for layer in dense):
            raise wrong("mlp_only_layers", dense, f"a list of layers, from 0 to {n_layers - 1}")
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in numbers)
    if scheme.layers == "first_dense":
        key = "num_dense_layers" if "num_dense_layers" in read.family.defaults else "first_k_dense_replace"
        first = _layer(read, key, 0, n_layers)
        return tuple(layer >= first for layer in numbers)
    if scheme.layers == "ernie":
        first, interval = _layer(read, "moe_layer_start_index", 0, n_layers), read.positive_int("moe_layer_interval")
        last = _layer(read, "moe_layer_end_index", -1, n_layers)
        last = n_layers - 1 if last == -1 else last
        return tuple((layer + 1) % interval == 0 and first <= layer <= last for layer in numbers)
    assert scheme.layers == "all", scheme
    return (True,) * n_layers


def _layer(read: ConfigReader, key: str, low: int, high: int) -> int:
    value = read.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(key, value, f"a layer from {low} to {high}")
    return value
