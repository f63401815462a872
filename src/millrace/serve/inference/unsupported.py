"""What of a configuration would change the answers, and is not served yet."""

from millrace.serve.inference.status import Code, StatusError
from millrace.serve.repository.config import ModelConfig, SequenceBatching


def refuse_not_yet(config: ModelConfig) -> None:
    """raises StatusError"""
    said = {
        "batch_input": config.batch_input, "batch_output": config.batch_output, "model_warmup": config.model_warmup,
    }  # fmt: skip
    for name, value in said.items():
        if value:
            raise StatusError(Code.UNSUPPORTED, f"{name} is not supported yet")
    if config.sequence_batching is not None:
        _refuse_sequences(config.sequence_batching, sum(group.count for group in config.instance_group))


def _refuse_sequences(said: SequenceBatching, n_instances: int) -> None:
    """Sequences of several requests; iterative ones are one request each, with the one instance that knows it."""
    if not said.iterative_sequence:
        raise StatusError(Code.UNSUPPORTED, "sequence_batching is not supported yet")
    parts = {
        "control_input": said.control_input, "state": said.state,
        "minimum_slot_utilization": said.direct and said.direct.minimum_slot_utilization,
        "preserve_ordering": said.oldest and said.oldest.preserve_ordering,
    }  # fmt: skip
    for name, value in parts.items():
        if value:
            raise StatusError(Code.UNSUPPORTED, f"sequence_batching: {name} is not supported yet")
    if n_instances > 1:
        what = f"iterative_sequence with {n_instances} instances is not supported yet: say instance_group"
        raise StatusError(Code.UNSUPPORTED, f"{what} {{ count: 1 kind: KIND_CPU }}")
