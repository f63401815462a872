"""Folders of mixtures of experts that contradict themselves: one error each, before weights are read."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.source import Source
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {
        family: random_checkpoint(root / family, family, max_shard_size="1GB")
        for family in ("mixtral", "glm4_moe", "qwen2_moe", "granitemoe", "phimoe")
    }


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7.*1 to 6"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("mixtral", {"num_local_experts": 5000}, "num_local_experts is 5000"),
        ("glm4_moe", {"n_group": 4}, "n_group is 4.*divisor of the 6 experts"),
        ("glm4_moe", {"topk_group": 4}, "topk_group is 4"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group is 1"),
        ("glm4_moe", {"num_local_experts": 8}, "num_local_experts is 8.*n_routed_experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("qwen2_moe", {"mlp_only_layers": [9]}, "mlp_only_layers"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3.*defined for two"),
        ("phimoe", {"router_jitter_noise": 0}, "router_jitter_noise is 0"),
    ],
)
def test_contradictory_keys(
    family: str, keys: dict[str, object], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    raw = json.loads((folders[family] / "config.json").read_text())
    count = {"n_routed_experts": 6} if family == "glm4_moe" else {}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **count, **keys}))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.without_weights(tmp_path)
    text = " ".join(str(error.value).split())
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("family", "tensor", "message"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight", "has no tensor"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias", "has no tensor"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight", "has no tensor"),
        ("granitemoe", "model.layers.0.block_sparse_moe.output_linear.weight", "has no tensor"),
    ],
)
def test_a_missing_tensor_is_named(
    family: str, tensor: str, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    for file in folders[family].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as error:
        plan_engine(Source.from_checkpoint(Checkpoint.open(tmp_path)), BuildOptions())
    assert tensor.split(".experts")[0].rsplit(".output", 1)[0] in str(error.value)


def test_a_stack_of_another_number_of_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["granitemoe"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name][:5].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj"):
        plan_engine(Source.from_checkpoint(Checkpoint.open(tmp_path)), BuildOptions())
