"""Rules that Triton checks before it loads a model, with Triton's messages, because users search for these.

Triton stops at the first violation; here all are reported with their paths. Ensembles: `ensemble_rules.py`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from millrace.errors import nearest
from millrace.model_repository.config.enums import ControlKind, DataType, Format, InstanceKind, TimeoutAction
from millrace.model_repository.config.model_config import (
    BatchInput,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelOutput,
    QueuePolicy,
    SequenceBatching,
)
from millrace.model_repository.config.pbtxt_binder import Path_

ENSEMBLE, TENSORRT = "ensemble", "tensorrt_plan"
VARIABLE = -1
_CORRID_TYPES = tuple(DataType[f"TYPE_{t}"] for t in ("UINT64", "INT64", "UINT32", "INT32", "STRING"))
_MAX_ELEMENTS = 1 << 64
_MAX_INSTANCES = 1024  # each needs a thread
_NONE = "a model for the CPU"
# Histogram families by stage; `model_metrics` may set their buckets.
HISTOGRAMS = {
    "success": "nv_inference_request_duration_histogram_us", "queue": "nv_inference_queue_duration_histogram_us",
    "compute_input": "nv_inference_compute_input_duration_histogram_us",
    "compute_infer": "nv_inference_compute_infer_duration_histogram_us",
    "compute_output": "nv_inference_compute_output_duration_histogram_us",
}  # fmt: skip
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_FAMILIES = (*HISTOGRAMS.values(), FIRST_RESPONSE)
# Backends without support for batch_input/batch_output, accelerators and graph levels.
_NO_BATCH_IO = ("identity", "add_sub", "repeat", "python", "millrace", "sklearn", "xgboost", "fil")
_NO_NETWORK = (*_NO_BATCH_IO, ENSEMBLE)
_NO_GRAPH = (*_NO_NETWORK, "pytorch", "tensorflow", "openvino")
_MAY_STAY = "it may stay or go"


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A violated rule. what: Triton's message"""

    path: Path_
    what: str
    expected: str
    fix: str


def rule_violations(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of a configuration completed by `autocomplete.py`."""
    if config.max_batch_size < 0:
        what = f"'max_batch_size' must be non-negative value for {config.name}"
        yield RuleViolation(("max_batch_size",), what, "0 for a model without a batch dimension", "give 0 or more")
    yield from _tensors(config)
    yield from _batch_io(config)
    yield from _dynamic_batching(config)
    yield from _sequence_batching(config)
    yield from _instances(config)
    yield from _metrics(config)
    if config.response_cache and config.response_cache.enable:
        with_ = "with 'decoupled' transaction policy" if _is_decoupled(config) else ""
        with_ = "with sequence batching scheduler" if config.sequence_batching else with_
        if with_:
            what = f"Response Cache does not currently support model {config.name} {with_}"
            what += ". Please disable the response cache."
            yield RuleViolation(("response_cache",), what, "one of them", "response_cache { enable: false }")


def unsupported_settings(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield settings that would affect results but are not implemented."""
    settings: dict[Path_, object] = {}
    if config.sequence_batching is not None and config.sequence_batching.iterative_sequence:
        yield from _iterative(config, config.sequence_batching)
    if config.backend in _NO_BATCH_IO:
        settings |= {("batch_input",): config.batch_input, ("batch_output",): config.batch_output}
    for path, value in settings.items():
        if value:
            by = f" by backend '{config.backend}'" if path[-1] in ("batch_input", "batch_output") else ""
            yield RuleViolation(path, f"{path[-1]} is not supported yet{by}", "a model without", "remove it")


def unused_settings(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield settings that the backend ignores. expected: the reason"""
    optimization, backend = config.optimization, "ensemble" if config.platform == ENSEMBLE else config.backend
    if optimization is None:
        return
    if optimization.graph is not None and backend in _NO_GRAPH:
        reason = f"only onnxruntime has levels of optimization, and this is {backend}"
        yield RuleViolation(("optimization", "graph"), "graph changes nothing", reason, _MAY_STAY)
    accelerators = optimization.execution_accelerators
    if accelerators and accelerators.cpu_execution_accelerator and backend in _NO_NETWORK:
        reason = f"accelerators are of networks, and this is {backend}"
        path = ("optimization", "execution_accelerators", "cpu_execution_accelerator")
        yield RuleViolation(path, "cpu_execution_accelerator changes nothing", reason, _MAY_STAY)


def _iterative(config: ModelConfig, batching: SequenceBatching) -> Iterator[RuleViolation]:
    """Yield settings that conflict with iterative sequences, which one instance computes repeatedly."""
    parts = {
        ("control_input",): batching.control_input, ("state",): batching.state,
        ("direct", "minimum_slot_utilization"): batching.direct and batching.direct.minimum_slot_utilization,
        ("oldest", "preserve_ordering"): batching.oldest and batching.oldest.preserve_ordering,
    }  # fmt: skip
    for path, value in parts.items():
        if value:
            what = f"{path[-1]} is not supported yet with iterative_sequence"
            yield RuleViolation(("sequence_batching", *path), what, "a model without", "remove it")
    n = sum(group.count for group in config.instance_group)
    if n > 1:
        what = f"iterative_sequence with {n} instances is not supported yet"
        fix = "say instance_group { count: 1 kind: KIND_CPU }"
        yield RuleViolation(("sequence_batching", "iterative_sequence"), what, "one instance", fix)


def _is_decoupled(config: ModelConfig) -> bool:
    return bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)


def _tensors(config: ModelConfig) -> Iterator[RuleViolation]:
    sides: dict[str, tuple[ModelInput | ModelOutput, ...]] = {"input": config.input, "output": config.output}
    for side, tensors in sides.items():
        names: set[str] = set()
        for i, tensor in enumerate(tensors):
            for path, what, expected, fix in _tensor(config, f"model {side} ", tensor):
                yield RuleViolation((side, i, *path), f"{what} for {config.name}", expected, fix)
            if tensor.name and tensor.name in names:
                what = f"model {side} '{tensor.name}' is given more than once for {config.name}"
                yield RuleViolation((side, i, "name"), what, "each name once", "rename or remove one")
            names.add(tensor.name)


_Part = tuple[Path_, str, str, str]


def _tensor(config: ModelConfig, prefix: str, tensor: ModelInput | ModelOutput) -> Iterator[_Part]:
    if not tensor.name:
        yield (), f"{prefix}must specify 'name'", "the tensor's name in the model", 'add name: "..."'
        return
    prefix_text = f"{prefix}'{tensor.name}' "
    if tensor.data_type is DataType.TYPE_INVALID:
        yield ("data_type",), f"{prefix_text}must specify 'data_type'", "TYPE_FP32, TYPE_INT64, ...", "add it"
    if not tensor.dims:
        fix = "add dims: [ ... ], without the batch dimension where max_batch_size > 0"
        yield ("dims",), f"{prefix_text}must specify 'dims'", "at least one; [ 1 ] for one number", fix
    for i, dim in enumerate(tensor.dims):
        if dim < 1 and dim != VARIABLE:
            what = f"{prefix_text}dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            yield ("dims", i), what, f"1 or more, or -1, not {dim}", "correct it"
    yield from _reshape(config, prefix_text, tensor)
    if isinstance(tensor, ModelInput) and tensor.format is not Format.FORMAT_NONE and len(tensor.dims) != 3:
        what = "model input NHWC/NCHW require 3 dims"
        yield ("format",), what, "3 dims, batch not counted", "remove format: it is only said to clients"
    if config.platform != TENSORRT and tensor.is_shape_tensor:
        yield ("is_shape_tensor",), "shape tensors are only supported for TensorRT platform", _NONE, "remove it"
    if config.platform != TENSORRT and tensor.is_non_linear_format_io:
        what = "Non-linear IO format is only supported for the TensorRT platform"
        yield ("is_non_linear_format_io",), what, _NONE, "remove it"


def _reshape(config: ModelConfig, prefix_text: str, tensor: ModelInput | ModelOutput) -> Iterator[_Part]:
    if tensor.reshape is None:
        return
    shape = tensor.reshape.shape
    if not shape and config.max_batch_size == 0:
        what = f"{prefix_text}cannot have empty reshape for non-batching model as scalar tensors are not supported"
        yield ("reshape",), what, "at least one dimension", "reshape { shape: [ 1 ] }, or remove it"
        return
    wrong = [i for i, dim in enumerate(shape) if dim < 1 and dim != VARIABLE]
    for i in wrong:
        what = f"{prefix_text}reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        yield ("reshape", "shape", i), what, f"1 or more, or -1, not {shape[i]}", "correct it"
    if wrong or not tensor.dims or any(dim < 1 and dim != VARIABLE for dim in tensor.dims):
        return
    ours, theirs = _runs(tensor.dims), _runs(shape)
    if len(ours) != len(theirs) and len(ours) > 1 and len(theirs) > 1:
        what = f"{prefix_text}has different number of variable-size dimensions for dims and reshape"
        yield ("reshape",), what, f"{len(ours) - 1} of -1, as dims has", "give both as many"
    elif ours != theirs:
        what = f"{prefix_text}has different size for dims and reshape"
        expected = f"as many elements as dims {list(tensor.dims)}, also between its -1"
        yield ("reshape",), what, expected, f"correct {list(shape)}"


def _runs(dims: tuple[int, ...]) -> list[int]:
    """Return the element counts between variable dims: [2, 4, -1, 6] -> [8, 6]."""
    runs = [1]
    for dim in dims:
        if dim == VARIABLE:
            runs.append(1)
        else:
            runs[-1] = min(runs[-1] * dim, _MAX_ELEMENTS)  # bounded: thousands of large dims would take minutes
    return runs


def _batch_io(config: ModelConfig) -> Iterator[RuleViolation]:
    inputs, outputs = {t.name for t in config.input}, {t.name for t in config.output}
    both: dict[str, tuple[BatchInput | BatchOutput, ...]]
    both = {"batch_input": config.batch_input, "batch_output": config.batch_output}
    for side, ios in both.items():
        for i, io in enumerate(ios):
            words = side.replace("_", " ")
            if len(io.source_input) != 1:
                what = f"{words} kind '{io.kind.name}' expects 1 source input, got {len(io.source_input)}"
                yield RuleViolation((side, i), f"{what} for {config.name}", "one", "name one input")
            for j, name in enumerate(io.source_input):
                if name not in inputs:
                    what = f"unknown source input name '{name}' for {config.name}"
                    yield RuleViolation((side, i, "source_input", j), what, _one_of(inputs), "name one input")
    for i, batch_input in enumerate(config.batch_input):
        if batch_input.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            what = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {config.name}"
            yield RuleViolation(("batch_input", i, "data_type"), what, "one of them", "correct it")
    for i, batch_output in enumerate(config.batch_output):
        target_names: set[str] = set()
        for j, name in enumerate(batch_output.target_name):
            what = "" if name in outputs else f"unknown target output name '{name}'"
            if name in target_names:
                what = f"target output name '{name}' can only be specified once"
            target_names.add(name)
            if what:
                path = ("batch_output", i, "target_name", j)
                yield RuleViolation(path, f"{what} for {config.name}", _one_of(outputs), "name each output once")


def _one_of(names: set[str]) -> str:
    return "one of: " + (", ".join(sorted(names)[:12]) or "(none is declared)")


def _preferred(config: ModelConfig, path: Path_, sizes: tuple[int, ...], words: str) -> Iterator[RuleViolation]:
    for i, size in enumerate(sizes):
        if size <= 0:
            yield RuleViolation(
                (*path, i), f"{words} must be positive for {config.name}", "1 or more", f"correct {size}"
            )
        elif size > config.max_batch_size:
            what = f"{words} must be <= max batch size for {config.name}"
            fix = "a smaller size, or a larger max_batch_size"
            yield RuleViolation((*path, i), what, f"at most max_batch_size, {config.max_batch_size}, not {size}", fix)


def _dynamic_batching(config: ModelConfig) -> Iterator[RuleViolation]:
    batching, top = config.dynamic_batching, "dynamic_batching"
    if batching is None:
        return
    sizes = batching.preferred_batch_size
    yield from _preferred(config, (top, "preferred_batch_size"), sizes, "dynamic batching preferred size")
    levels, default = batching.priority_levels, batching.default_priority_level
    policies: dict[Path_, QueuePolicy] = {
        (top, "priority_queue_policy", str(k)): v for k, v in batching.priority_queue_policy.items()
    }
    if levels and not 1 <= default <= levels:
        what = f"default priority level must be in range [1, {levels}] for {config.name}"
        yield RuleViolation((top, "default_priority_level"), what, f"1 to {levels}, not {default}", "add or correct it")
    for level in batching.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            what = f"priority queue policy must have priority level in range [1, {levels}] for {config.name}"
            fix = "correct the key, or raise priority_levels"
            yield RuleViolation((top, "priority_queue_policy", str(level)), what, f"1 to {levels}, not {level}", fix)
    if not batching.preserve_ordering:
        return
    if levels > 1:
        what = f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}"
        yield RuleViolation(
            (top, "preserve_ordering"), what, "one of them", "remove priority_levels or preserve_ordering"
        )
    if batching.default_queue_policy:
        policies[(top, "default_queue_policy")] = batching.default_queue_policy
    for path, policy in policies.items():
        if policy.default_timeout_microseconds and policy.timeout_action is TimeoutAction.DELAY:
            what = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for "
            yield RuleViolation(path, what + config.name, "REJECT", "timeout_action: REJECT, or no preserve_ordering")


def _sequence_batching(config: ModelConfig) -> Iterator[RuleViolation]:
    batching, top = config.sequence_batching, "sequence_batching"
    if batching is None:
        return
    if batching.oldest:
        sizes = batching.oldest.preferred_batch_size
        yield from _preferred(
            config, (top, "oldest", "preferred_batch_size"), sizes, "sequence batching preferred batch size"
        )
    if batching.direct and not 0 <= batching.direct.minimum_slot_utilization <= 1:
        what = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}"
        yield RuleViolation((top, "direct", "minimum_slot_utilization"), what, "up to 1", "correct it")
    names, kinds = set[str](), set[ControlKind]()
    for i, tensor in enumerate(batching.control_input):
        path: Path_ = (top, "control_input", i)
        if not tensor.name:
            what = f"sequence batching control tensor must have a name for {config.name}"
            yield RuleViolation(path, what, "the tensor's name in the model", 'add name: "..."')
        elif tensor.name in names:
            what = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for "
            yield RuleViolation((*path, "name"), what + config.name, "each tensor once", "rename or remove one")
        names.add(tensor.name)
        for j, control in enumerate(tensor.control):
            where = (*path, "control", j)
            if control.kind in kinds:
                what = f"sequence batching specifies multiple {control.kind.name} tensors for {config.name}"
                yield RuleViolation(where, what, "each kind once", "remove one")
            kinds.add(control.kind)
            switches = {
                "int32_false_true": control.int32_false_true, "fp32_false_true": control.fp32_false_true,
                "bool_false_true": control.bool_false_true,
            }  # fmt: skip
            for what, fix in _control(control.kind, control.data_type, switches):
                yield RuleViolation(where, f"{what} for {config.name}{_allowed(what)}", "as the kind has it", fix)


_TWO = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def _allowed(message: str) -> str:
    listed = "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
    return f". Allowed data types are {listed}" if message.startswith("unexpected data type") else ""


def _control(
    kind: ControlKind, data_type: DataType, switches: dict[str, tuple[float, ...]]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of problem and fix for a control."""
    specified = [name for name, values in switches.items() if values]
    if kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        if specified:
            yield f"sequence batching must not specify either {_TWO} for {kind.name}", f"remove {specified[0]}"
        if data_type not in _CORRID_TYPES:
            yield f"unexpected data type for control {kind.name}", "data_type: TYPE_UINT64"
    elif not specified:
        yield f"sequence batching must specify either {_TWO} for {kind.name}", "int32_false_true: [ 0, 1 ]"
    elif len(specified) > 1:
        which = _TWO.replace(" or ", " and ")
        yield f"sequence batching specifies more than one from {which} for {kind.name}", f"remove {specified[1]}"
    elif len(switches[specified[0]]) != 2:
        what = f"sequence batching control '{specified[0]}' must have exactly 2 entries for {kind.name}"
        yield what, f"{specified[0]}: [ the value of false, the value of true ]"


def _instances(config: ModelConfig) -> Iterator[RuleViolation]:
    for i, group in enumerate(config.instance_group):
        who = f"instance group {group.name or f'{config.name}_{i}'} of model {config.name}"
        if group.kind is InstanceKind.KIND_GPU:
            fix = "KIND_CPU, or KIND_AUTO, which takes a GPU where there is one"
            what = f"{who} has kind KIND_GPU but server does not support GPUs"
            yield RuleViolation(("instance_group", i, "kind"), what, "KIND_CPU, KIND_AUTO or KIND_MODEL", fix)
        elif group.gpus:
            what = f"{who} has kind {group.kind.name} but specifies one or more GPUs"
            yield RuleViolation(("instance_group", i, "gpus"), what, "no gpus", "remove gpus")
        if group.count > _MAX_INSTANCES:
            what = f"{who} has count {group.count}"
            yield RuleViolation(("instance_group", i, "count"), what, f"at most {_MAX_INSTANCES}", "correct it")
        if group.count < 0:
            yield RuleViolation(
                ("instance_group", i, "count"), f"{who} has count {group.count}", "1 or more", "correct it"
            )
        if group.profile and config.platform != TENSORRT:
            what = f"{who} and platform {config.platform}specifies profile field which is only supported for TensorRT"
            yield RuleViolation(("instance_group", i, "profile"), what + " models", "no profile", "remove it")


def _metrics(config: ModelConfig) -> Iterator[RuleViolation]:
    for i, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        what = ""
        buckets = control.histogram_options.buckets if control.histogram_options else ()
        if control.metric_identifier is None:
            what = "metric control must specify 'metric_identifier'"
        elif not control.metric_identifier.family:
            what = "metric identifier must specify non-empty 'family'"
        elif control.histogram_options is None:
            what = "metric control must specify 'histogram_options'"
        elif not buckets:
            what = "histogram options must specify non-empty 'buckets'"
        path: Path_ = ("model_metrics", "metric_control", i)
        if what:
            expected = "metric_identifier { family: ... } histogram_options { buckets: [ ... ] }"
            yield RuleViolation(path, what, expected, "add it")
            continue
        family = control.metric_identifier.family if control.metric_identifier else ""
        if family not in _FAMILIES:
            what = f"metric family '{family}' is no histogram of the server's"
            yield RuleViolation((*path, "metric_identifier", "family"), what, nearest(family, _FAMILIES), "correct it")
        if list(buckets) != sorted(set(buckets)) or not all(map(math.isfinite, buckets)):
            where = (*path, "histogram_options", "buckets")
            yield RuleViolation(
                where, "histogram options must have 'buckets' in ascending order", "each once", "order them"
            )
    for name in config.metric_tags:
        if not re.fullmatch("[A-Za-z0-9_]+", name):
            fix = "letters, digits and _"
            yield RuleViolation(
                ("metric_tags", name), f"metric tag '{name}' can be no label of a metric", fix, "rename it"
            )
