"""Completion of a configuration from its folder (backend, platform, model file) and with Triton's defaults.

Missing inputs and outputs are completed by the backend when it loads the model.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from millrace.model_repository.config.config_rules import ENSEMBLE, RuleViolation
from millrace.model_repository.config.enums import InstanceKind
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import InstanceGroup, Latest, ModelConfig, VersionPolicy
from millrace.model_repository.config.pbtxt_binder import Path_

_IDLE_MICROSECONDS = 1_000_000  # default idle time of a sequence
_TWO_ON_CPU = ("tensorflow", "onnxruntime")  # two CPU instances by default, as in Triton


@dataclass(frozen=True, slots=True)
class BackendFile:
    """A backend and platform, recognised by the default name of the model file."""

    backend: str
    platform: str
    file: str


# In Triton's order: the first whose file exists is used.
BACKEND_FILES = (
    BackendFile("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    BackendFile("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    BackendFile("tensorrt", "tensorrt_plan", "model.plan"),
    BackendFile("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    BackendFile("openvino", "", "model.xml"),
    BackendFile("openvino", "", "model.onnx"),  # only if the backend is named
    BackendFile("pytorch", "pytorch_libtorch", "model.pt"),
    BackendFile("pytorch", "torch_aoti", "model.pt2"),
    BackendFile("python", "", "model.py"),
    BackendFile("xgboost", "", "xgboost.json"),
    BackendFile("xgboost", "", "xgboost.ubj"),
    BackendFile("fil", "", "xgboost.json"),  # Triton's FIL backend, for XGBoost models
    BackendFile("fil", "", "xgboost.ubj"),
    BackendFile("sklearn", "", "model.skops"),
)
_OTHER_NAMES = {"libtorch": "pytorch_libtorch"}
# Backends that add nothing to configured inputs and outputs; a model.py may.
NETWORKS = frozenset({k.backend for k in BACKEND_FILES} - {"python"})
ADDING_NOTHING = NETWORKS | {"identity", "add_sub", "repeat", "millrace"}
GRAPHDEF = "tensorflow_graphdef"
GPU_ONLY = ("tensorrt", "tensorrtllm", "dali")  # Triton backends without CPU support
VLLM = "vllm"


def complete_config(config: ModelConfig, name: str, files: Collection[str]) -> tuple[ModelConfig, tuple[str, ...]]:
    """Complete a configuration; also return what was added, in words. files: in the first version's folder"""
    added = []
    config = replace(config, name=config.name or name, platform=_OTHER_NAMES.get(config.platform, config.platform))
    if not config.backend and config.platform != ENSEMBLE:
        kind = _kind(config, files)
        _, dot, ending = name.partition(".")
        if kind:
            config = replace(config, backend=kind.backend)
            added.append(f"backend {kind.backend}, by {_reason(config, kind, files)}")
        elif dot and ending and not config.platform and not config.default_model_filename:
            config = replace(config, backend=ending, default_model_filename=f"model.{ending}")
            added.append(f"backend {ending}, by the model's name")
    mine = [k for k in BACKEND_FILES if k.backend == config.backend and config.platform in ("", k.platform)]
    if mine:
        usual = next((k for k in mine if k.file in (config.default_model_filename, *files)), mine[0])
        file = config.default_model_filename or usual.file
        config = replace(config, platform=config.platform or usual.platform, default_model_filename=file)
    return _normalise(config), tuple(added)


def _kind(config: ModelConfig, files: Collection[str]) -> BackendFile | None:
    if config.platform:
        return next((k for k in BACKEND_FILES if k.platform == config.platform), None)
    if config.default_model_filename:
        return next((k for k in BACKEND_FILES if k.file == config.default_model_filename), None)
    return next((k for k in BACKEND_FILES if k.file in files), None)


def _reason(config: ModelConfig, kind: BackendFile, files: Collection[str]) -> str:
    if config.platform:
        return "its platform"
    return "default_model_filename" if config.default_model_filename else f"{kind.file} in its folder"


def _normalise(config: ModelConfig) -> ModelConfig:
    """Apply Triton's defaults."""
    if config.version_policy is None:
        config = replace(config, version_policy=replace(empty(VersionPolicy), latest=Latest(num_versions=1)))
    sizes = (config.max_batch_size,) if config.max_batch_size > 0 else ()
    if (batching := config.dynamic_batching) and not batching.preferred_batch_size:
        config = replace(config, dynamic_batching=replace(batching, preferred_batch_size=sizes))
    if sequences := config.sequence_batching:
        idle = sequences.max_sequence_idle_microseconds or _IDLE_MICROSECONDS
        oldest = sequences.oldest
        if oldest and not oldest.preferred_batch_size:
            oldest = replace(oldest, preferred_batch_size=sizes)
        sequences = replace(sequences, max_sequence_idle_microseconds=idle, oldest=oldest)
        config = replace(config, sequence_batching=sequences)
    if steps := config.ensemble_scheduling:  # versions as clients see them, where 0 does not exist
        versioned_steps = tuple(replace(step, model_version=step.model_version or -1) for step in steps.step)
        config = replace(config, ensemble_scheduling=replace(steps, step=versioned_steps))
    if config.platform == ENSEMBLE or config.ensemble_scheduling:
        return config
    groups = config.instance_group or (replace(empty(InstanceGroup), name=config.name),)
    return replace(config, instance_group=tuple(_instances(config, g, i) for i, g in enumerate(groups)))


def _instances(config: ModelConfig, group: InstanceGroup, number: int) -> InstanceGroup:
    kind = group.kind
    if kind is InstanceKind.KIND_AUTO:  # there are no GPUs; listed ones are reported as ignored
        kind, group = InstanceKind.KIND_CPU, replace(group, gpus=())
    count = 2 if kind is InstanceKind.KIND_CPU and config.backend in _TWO_ON_CPU else 1
    return replace(group, name=group.name or f"{config.name}_{number}", kind=kind, count=group.count or count)


def backend_violation(config: ModelConfig) -> RuleViolation | None:
    """Return why no backend can run the model, or None. config: completed"""
    at: Path_ = ("backend",) if config.backend else ("platform",)
    if config.platform == ENSEMBLE:
        return None
    if not config.backend and config.platform:
        message = f"unexpected platform type '{config.platform}' for {config.name}"
        known_platforms = ", ".join([*(k.platform for k in BACKEND_FILES if k.platform), ENSEMBLE])
        return RuleViolation(at, message, f"one of: {known_platforms}", 'correct it, or name a backend: "..."')
    if not config.backend:
        message = f"must specify 'platform' or 'backend' for '{config.name}'"
        files = dict.fromkeys(k.file for k in BACKEND_FILES)
        return RuleViolation((), message, f"a backend, or one of {', '.join(files)}", 'add backend: "..."')
    platforms = {k.platform for k in BACKEND_FILES if k.backend == config.backend}
    if platforms and config.platform not in platforms:
        message = f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}"
        expected = " or ".join(sorted(platforms - {""})) or "no platform"
        return RuleViolation(("platform",), message, expected, "remove platform: backend says enough")
    if config.platform == GRAPHDEF:
        message = f"platform '{GRAPHDEF}' of model '{config.name}' is not supported: a graph says nothing of its inputs"
        return RuleViolation(("platform",), message, "tensorflow_savedmodel", "export it as a SavedModel")
    if config.backend in GPU_ONLY:
        return RuleViolation(
            at, f"backend {config.backend} needs a GPU", "a backend for the CPU", "export the model to ONNX"
        )
    if config.backend == VLLM:
        message = "backend vllm is not run here: vLLM wants a GPU, and a process and packages of its own"
        fix = (
            'say backend: "millrace", which serves a checkpoint under the same names (text_input, text_output, stream)'
        )
        return RuleViolation(at, message, "a backend for the CPU", fix)
    return None
