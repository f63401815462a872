"""Reads the keys of a GGUF file that describe a model's experts."""

from millrace.checkpoint.config.expert_config import MAX_CHOSEN, MAX_EXPERTS, ExpertConfig
from millrace.checkpoint.config.families.family import ExpertScheme, ModelFamily
from millrace.checkpoint.config.routing import Routing
from millrace.checkpoint.gguf.metadata_keys import MetadataKeys

_NORMALISED = {"qwen2moe": False, "qwen3moe": True, "olmoe": False}  # llama.cpp's, where config.json has a key for it
_SCORING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers
_JITTER = 0.01  # router_jitter_noise of Phi-3.5-MoE, which files do not state


def read_experts(keys: MetadataKeys, arch: str, family: ModelFamily, n_layers: int) -> ExpertConfig | None:
    """Return the experts; None if the family has none. raises CheckpointError"""
    scheme = family.experts
    if scheme is None:
        return None
    count, chosen = keys.integer(f"{arch}.expert_count"), keys.integer(f"{arch}.expert_used_count")
    if count > MAX_EXPERTS:
        raise keys.wrong(f"{arch}.expert_count", f"at most {MAX_EXPERTS}")
    if chosen > min(MAX_CHOSEN, count):
        raise keys.wrong(f"{arch}.expert_used_count", f"at most {min(MAX_CHOSEN, count)} of {count} experts")
    inner = keys.integer(f"{arch}.feed_forward_length")
    own_size = scheme.size != "intermediate_size"
    # llama.cpp's default if the key is missing
    size = keys.integer(f"{arch}.expert_feed_forward_length", max(inner // chosen, 1)) if own_size else inner
    return ExpertConfig(
        count=count, size=size, routing=_routing(keys, arch, scheme, count, chosen),
        layers=_layers(keys, arch, n_layers),
        shared_size=_shared_size(keys, arch, scheme, size, inner), shared_gate=family.name == "qwen2_moe",
        selection_bias=bool(scheme.bias),
    )  # fmt: skip


def _routing(keys: MetadataKeys, arch: str, scheme: ExpertScheme, count: int, chosen: int) -> Routing:
    gating = keys.integer(f"{arch}.expert_gating_func", 0, low=0)
    if gating not in (0, _SCORING.get(scheme.scoring)):
        raise keys.wrong(f"{arch}.expert_gating_func", f"{_SCORING.get(scheme.scoring, 0)} ({scheme.scoring})")
    epsilon = scheme.epsilon
    if scheme.scoring == "sparsemixer":
        epsilon = 2 * _JITTER
        if chosen != 2:
            raise keys.wrong(f"{arch}.expert_used_count", "2: its routing is defined for two experts")
    fixed = _NORMALISED.get(arch, scheme.normalise)
    normalise = keys.boolean(f"{arch}.expert_weights_norm", False if fixed is None else fixed)
    if fixed is not None and normalise != fixed:
        raise keys.wrong(f"{arch}.expert_weights_norm", f"{fixed}, as in all models of {arch}".lower())
    groups = keys.integer(f"{arch}.expert_group_count", 0, low=0) or 1
    chosen_groups = keys.integer(f"{arch}.expert_group_used_count", 0, low=0) or 1
    if count % groups:
        raise keys.wrong(f"{arch}.expert_group_count", f"a divisor of the {count} experts")
    if chosen_groups > groups or chosen_groups * (count // groups) < chosen:
        expected = f"at most {groups} groups, that have {chosen} experts or more"
        raise keys.wrong(f"{arch}.expert_group_used_count", expected)
    scale = keys.optional_number(f"{arch}.expert_weights_scale", 1.0)
    return Routing(
        chosen=chosen, scoring=scheme.scoring, normalise=normalise, scale=scale, epsilon=epsilon, groups=groups,
        chosen_groups=chosen_groups, group_best=min(2, count // groups) if arch == "glm4moe" else 1,
    )  # fmt: skip


def _shared_size(keys: MetadataKeys, arch: str, scheme: ExpertScheme, size: int, inner: int) -> int:
    """Return the width of the shared MLP; 0 if there is none."""
    if not scheme.shared:
        return 0
    if arch == "glm4moe":
        return keys.integer(f"{arch}.expert_shared_count", low=0) * size
    missing = inner if arch == "qwen2moe" else 0
    return keys.integer(f"{arch}.expert_shared_feed_forward_length", missing, low=0) or missing


def _layers(keys: MetadataKeys, arch: str, n_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts."""
    first = keys.integer(f"{arch}.leading_dense_block_count", 0, low=0)
    step = keys.integer(f"{arch}.interleave_moe_layer_step", 1)
    layers = tuple(layer >= first and (layer + 1) % step == 0 for layer in range(n_layers))
    if not any(layers):
        name = "leading_dense_block_count" if first >= n_layers else "interleave_moe_layer_step"
        raise keys.wrong(f"{arch}.{name}", f"at least one of {n_layers} layers with experts")
    return layers
