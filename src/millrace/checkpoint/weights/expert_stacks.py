"""Splits tensors that stack the matrices of all experts into one tensor per expert and matrix. No data is copied."""

from collections.abc import Mapping
from dataclasses import replace

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.mxfp4.tensors import StackedExpertTensors
from millrace.checkpoint.weights.safetensors import TensorInfo, Tensors

# By model type: the end of a stack's name -> the matrices that follow each other in each expert's part, by their names
# in the block. Rows are outputs.
_STACKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "granitemoe": {
        "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
        "block_sparse_moe.output_linear.weight": ("down_proj",),
    },
}
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "granitemoe": {"block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight"},
}


def split_expert_stacks(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Return the tensors with stacks of this family's experts split; what has another shape stays as it is."""
    if config.experts is None:
        return tensors
    if config.family == "gpt_oss":
        return StackedExpertTensors.from_tensors(tensors, config)
    infos: dict[str, TensorInfo] = {}
    for info in tensors.values():
        for part in _split(info, config):
            infos[part.name] = part
    return tensors.with_infos(infos)


def _split(info: TensorInfo, config: ModelConfig) -> list[TensorInfo]:
    for end, new in _RENAMED.get(config.family, {}).items():
        if info.name.endswith(end):
            return [replace(info, name=info.name.removesuffix(end) + new)]
    assert config.experts is not None
    for end, matrices in _STACKS.get(config.family, {}).items():
        shape, count = info.shape, config.experts.count
        if info.name.endswith(end) and len(shape) == 3 and shape[0] == count and shape[1] % len(matrices) == 0:
            prefix = info.name.removesuffix(end) + end.split(".")[0]
            rows, nbytes = shape[1] // len(matrices), info.nbytes // (count * len(matrices))
            names = [f"{prefix}.experts.{expert}.{matrix}.weight" for expert in range(count) for matrix in matrices]
            return [
                replace(info, name=name, shape=(rows, shape[2]), nbytes=nbytes, offset=info.offset + i * nbytes)
                for i, name in enumerate(names)
            ]
    return [info]
