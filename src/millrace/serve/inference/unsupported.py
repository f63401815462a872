"""What of a configuration is refused: what is not served yet and changes answers, and what a client may not say."""

from millrace.serve.inference.status import Code, StatusError, invalid
from millrace.serve.repository.config import ModelConfig, SequenceBatching

# Triton's parameter that names an environment, and what a path in it may begin with.
ENVIRONMENT, MODEL_FOLDER = "EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY"


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


def check_given(given: ModelConfig, own: ModelConfig | None) -> None:
    """A configuration that a client gave, beside that of the model's folder: it runs no program of the client's choice.

    raises StatusError
    """
    said = _interpreter(given)
    if said and not said.startswith(f"{MODEL_FOLDER}/") and (own is None or said != _interpreter(own)):
        what = f"{ENVIRONMENT} of model '{given.name}' is another one than its config.pbtxt has"
        raise invalid(f"{what}: a load may name environments in the model's folder alone ({MODEL_FOLDER}/...)")


def _interpreter(config: ModelConfig) -> str:
    parameter = config.parameters.get(ENVIRONMENT)
    return parameter.string_value if parameter is not None else ""
