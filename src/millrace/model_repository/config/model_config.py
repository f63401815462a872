"""Messages of config.pbtxt: Triton's `ModelConfig`, with the names, numbers and types of its protocol (2.73).

Each field is used, or declares why it has no effect (`ignored`) or why a model with it is not served (`refused`).
Messages are declared before those that contain them.
"""

from collections.abc import Mapping

from millrace.model_repository.config.enums import (
    BatchInputKind,
    BatchOutputKind,
    ControlKind,
    DataType,
    Format,
    InstanceKind,
    ModelPriority,
    SecondaryDeviceKind,
    TimeoutAction,
)
from millrace.model_repository.config.message_fields import Double, Float, Int32, Int64, UInt32, UInt64, field, message

_NO_GPU = "it is about GPUs; tensor models run on the CPU here"
_NO_PINNED = "pinned memory is for copies to a GPU; there are none here"
_MEMORY = "it says how memory is shared, not what is computed"


@message
class Latest:
    num_versions: UInt32 = field(1)


@message
class All:
    pass


@message
class Specific:
    versions: tuple[Int64, ...] = field(1)


@message
class VersionPolicy:
    latest: Latest | None = field(1, oneof="policy_choice")
    all: All | None = field(2, oneof="policy_choice")
    specific: Specific | None = field(3, oneof="policy_choice")


@message
class Reshape:
    shape: tuple[Int64, ...] = field(1)


@message
class ModelInput:
    name: str = field(1)
    data_type: DataType = field(2)
    format: Format = field(3)
    dims: tuple[Int64, ...] = field(4)
    reshape: Reshape | None = field(5)
    is_shape_tensor: bool = field(6)
    allow_ragged_batch: bool = field(7)
    optional: bool = field(8)
    is_non_linear_format_io: bool = field(9)


@message
class ModelOutput:
    name: str = field(1)
    data_type: DataType = field(2)
    dims: tuple[Int64, ...] = field(3)
    reshape: Reshape | None = field(5)
    label_filename: str = field(4)
    is_shape_tensor: bool = field(6)
    is_non_linear_format_io: bool = field(7)


@message
class BatchInput:
    kind: BatchInputKind = field(1)
    target_name: tuple[str, ...] = field(2)
    data_type: DataType = field(3)
    source_input: tuple[str, ...] = field(4)


@message
class BatchOutput:
    target_name: tuple[str, ...] = field(1)
    kind: BatchOutputKind = field(2)
    source_input: tuple[str, ...] = field(3)


@message
class Resource:
    name: str = field(1)
    is_global: bool = field(2, called="global")
    count: UInt32 = field(3)


@message
class RateLimiter:
    resources: tuple[Resource, ...] = field(1)
    priority: UInt32 = field(2)


@message
class SecondaryDevice:
    kind: SecondaryDeviceKind = field(1)
    device_id: Int64 = field(2)


@message
class InstanceGroup:
    name: str = field(1)
    kind: InstanceKind = field(4)
    count: Int32 = field(2)
    rate_limiter: RateLimiter | None = field(6)
    gpus: tuple[Int32, ...] = field(3, ignored=_NO_GPU)
    secondary_devices: tuple[SecondaryDevice, ...] = field(8, ignored="NVDLA is a device of Jetson")
    profile: tuple[str, ...] = field(5)
    passive: bool = field(7, ignored="it keeps instances from requests, which all take here")
    host_policy: str = field(9, ignored="there are no host policies here: the server has all its cores")


@message
class Graph:
    level: Int32 = field(1)


@message
class Shape:
    dim: tuple[Int64, ...] = field(1)


@message
class LowerBound:
    batch_size: Int32 = field(1)
    input: Mapping[str, Shape] = field(2)


@message
class GraphSpec:
    batch_size: Int32 = field(1)
    input: Mapping[str, Shape] = field(2)
    graph_lower_bound: LowerBound | None = field(3)


@message
class Cuda:
    graphs: bool = field(1)
    busy_wait_events: bool = field(2)
    graph_spec: tuple[GraphSpec, ...] = field(3)
    output_copy_stream: bool = field(4)


@message
class Accelerator:
    name: str = field(1)
    parameters: Mapping[str, str] = field(2)


@message
class ExecutionAccelerators:
    gpu_execution_accelerator: tuple[Accelerator, ...] = field(1, ignored=_NO_GPU)
    cpu_execution_accelerator: tuple[Accelerator, ...] = field(2)


@message
class PinnedMemoryBuffer:
    enable: bool = field(1)


@message
class Optimization:
    graph: Graph | None = field(1)
    priority: ModelPriority = field(2, ignored="it is TensorRT's priority of a GPU's streams")
    cuda: Cuda | None = field(3, ignored=_NO_GPU)
    execution_accelerators: ExecutionAccelerators | None = field(4)
    input_pinned_memory: PinnedMemoryBuffer | None = field(5, ignored=_NO_PINNED)
    output_pinned_memory: PinnedMemoryBuffer | None = field(6, ignored=_NO_PINNED)
    gather_kernel_buffer_threshold: UInt32 = field(7, ignored=_NO_GPU)
    eager_batching: bool = field(8, ignored="it says when inputs are gathered, not what is computed")


@message
class QueuePolicy:
    timeout_action: TimeoutAction = field(1)
    default_timeout_microseconds: UInt64 = field(2)
    allow_timeout_override: bool = field(3)
    max_queue_size: UInt32 = field(4)


@message
class DynamicBatching:
    preferred_batch_size: tuple[Int32, ...] = field(1)
    max_queue_delay_microseconds: UInt64 = field(2)
    preserve_ordering: bool = field(3)
    priority_levels: UInt64 = field(4)
    default_priority_level: UInt64 = field(5)
    default_queue_policy: QueuePolicy | None = field(6)
    priority_queue_policy: Mapping[UInt64, QueuePolicy] = field(7)


@message
class Control:
    kind: ControlKind = field(1)
    int32_false_true: tuple[Int32, ...] = field(2)
    fp32_false_true: tuple[Float, ...] = field(3)
    bool_false_true: tuple[bool, ...] = field(5)
    data_type: DataType = field(4)


@message
class ControlInput:
    name: str = field(1)
    control: tuple[Control, ...] = field(2)


@message
class InitialState:
    data_type: DataType = field(1)
    dims: tuple[Int64, ...] = field(2)
    zero_data: bool = field(3, oneof="state_data")
    data_file: str = field(4, oneof="state_data")
    name: str = field(5)


@message
class State:
    input_name: str = field(1)
    output_name: str = field(2)
    data_type: DataType = field(3)
    dims: tuple[Int64, ...] = field(4)
    initial_state: tuple[InitialState, ...] = field(5)
    use_same_buffer_for_input_output: bool = field(6, ignored=_MEMORY)
    use_growable_memory: bool = field(7, ignored=_MEMORY)


@message
class StrategyDirect:
    max_queue_delay_microseconds: UInt64 = field(1)
    minimum_slot_utilization: Float = field(2)


@message
class StrategyOldest:
    max_candidate_sequences: Int32 = field(1)
    preferred_batch_size: tuple[Int32, ...] = field(2)
    max_queue_delay_microseconds: UInt64 = field(3)
    preserve_ordering: bool = field(4)


@message
class SequenceBatching:
    direct: StrategyDirect | None = field(3, oneof="strategy_choice")
    oldest: StrategyOldest | None = field(4, oneof="strategy_choice")
    max_sequence_idle_microseconds: UInt64 = field(1)
    control_input: tuple[ControlInput, ...] = field(2)
    state: tuple[State, ...] = field(5)
    iterative_sequence: bool = field(6)


@message
class Step:
    model_name: str = field(1)
    model_version: Int64 = field(2)
    input_map: Mapping[str, str] = field(3)
    output_map: Mapping[str, str] = field(4)
    model_namespace: str = field(5)


@message
class EnsembleScheduling:
    step: tuple[Step, ...] = field(1)
    max_inflight_requests: UInt32 = field(2)


@message
class Parameter:
    string_value: str = field(1)


@message
class WarmupInput:
    data_type: DataType = field(1)
    dims: tuple[Int64, ...] = field(2)
    zero_data: bool = field(3, oneof="input_data_type")
    random_data: bool = field(4, oneof="input_data_type")
    input_data_file: str = field(5, oneof="input_data_type")


@message
class Warmup:
    name: str = field(1)
    batch_size: UInt32 = field(2)
    inputs: Mapping[str, WarmupInput] = field(3)
    count: UInt32 = field(4)


@message
class Operations:
    op_library_filename: tuple[str, ...] = field(
        1, refused="libraries of operators of its own are not loaded; without them its backend cannot run the model"
    )


@message
class TransactionPolicy:
    decoupled: bool = field(1)


@message
class Agent:
    name: str = field(1)
    parameters: Mapping[str, str] = field(2)


@message
class RepositoryAgents:
    agents: tuple[Agent, ...] = field(
        1, refused="agents (of checksums, of decryption) are not run, and what they guard would not be guarded"
    )


@message
class ResponseCache:
    enable: bool = field(1)


@message
class MetricIdentifier:
    family: str = field(1)


@message
class HistogramOptions:
    buckets: tuple[Double, ...] = field(1)


@message
class MetricControl:
    metric_identifier: MetricIdentifier | None = field(1)
    histogram_options: HistogramOptions | None = field(2, oneof="metric_options")


@message
class Metrics:
    metric_control: tuple[MetricControl, ...] = field(1)


@message
class ModelConfig:
    """Configuration of a model, as in its folder or completed by `autocomplete.py`."""

    name: str = field(1)
    platform: str = field(2)
    backend: str = field(17)
    runtime: str = field(25, ignored="it names a backend's library, and ours are no such files")
    version_policy: VersionPolicy | None = field(3)
    max_batch_size: Int32 = field(4)
    input: tuple[ModelInput, ...] = field(5)
    output: tuple[ModelOutput, ...] = field(6)
    batch_input: tuple[BatchInput, ...] = field(20)
    batch_output: tuple[BatchOutput, ...] = field(21)
    optimization: Optimization | None = field(12)
    dynamic_batching: DynamicBatching | None = field(11, oneof="scheduling_choice")
    sequence_batching: SequenceBatching | None = field(13, oneof="scheduling_choice")
    ensemble_scheduling: EnsembleScheduling | None = field(15, oneof="scheduling_choice")
    instance_group: tuple[InstanceGroup, ...] = field(7)
    default_model_filename: str = field(8)
    cc_model_filenames: Mapping[str, str] = field(9, ignored="files by compute capability are for GPUs")
    metric_tags: Mapping[str, str] = field(10)
    parameters: Mapping[str, Parameter] = field(14)
    model_warmup: tuple[Warmup, ...] = field(16)
    model_operations: Operations | None = field(18)
    model_transaction_policy: TransactionPolicy | None = field(19)
    model_repository_agents: RepositoryAgents | None = field(23)
    response_cache: ResponseCache | None = field(24)
    model_metrics: Metrics | None = field(26)
