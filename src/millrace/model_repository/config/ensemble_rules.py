"""Rules of ensembles: each tensor has exactly one producer and at least one consumer. Messages are Triton's."""

from collections.abc import Iterator

from millrace.model_repository.config.config_rules import ENSEMBLE, RuleViolation
from millrace.model_repository.config.model_config import EnsembleScheduling, ModelConfig

_TOP = "ensemble_scheduling"


def ensemble_violations(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of an ensemble's rules; none if `config` is not an ensemble."""
    scheduling, name = config.ensemble_scheduling, config.name
    if scheduling is None:
        if config.platform == ENSEMBLE:
            what = f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
            yield RuleViolation(
                ("platform",), what, "ensemble_scheduling { step [ ... ] }", "add it, or name a backend"
            )
        return
    if config.platform != ENSEMBLE:
        what = f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
        yield RuleViolation((_TOP,), what, f'platform: "{ENSEMBLE}"', "correct platform")
    elif config.backend:
        what = f"Ensemble model '{name}' must have platform type '{ENSEMBLE}' and empty backend type"
        yield RuleViolation(("backend",), what, "no backend", "remove it")
    forbidden = (
        ("instance_group", config.instance_group, f"instance group should not be specified for ensemble '{name}'"),
        ("optimization", config.optimization, f"optimization should not be specified for ensemble '{name}'"),
        ("model_warmup", config.model_warmup, f"model_warmup can not be specified for ensemble '{name}'"),
    )
    for field, value, what in forbidden:
        if value:
            yield RuleViolation((field,), what, "it in the models of its steps", "move it there")
    if not scheduling.step:
        yield RuleViolation((_TOP,), f"must specify 'step' for ensemble '{name}'", "a step or more", "add step [ ... ]")
        return
    steps = list(_steps(scheduling, name))
    yield from steps
    if steps:  # consequences of these are not reported
        return
    flow = list(_flow(config, scheduling))
    yield from flow or _unused(config, scheduling)


def _steps(scheduling: EnsembleScheduling, name: str) -> Iterator[RuleViolation]:
    produced: set[str] = set()
    for i, step in enumerate(scheduling.step):
        path = (_TOP, "step", i)
        if step.model_namespace:
            message = f"'model_namespace' in step {i} of ensemble '{name}' is reserved"
            yield RuleViolation(
                (*path, "model_namespace"), message, "the model beside it, or the only one", "remove it"
            )
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                message = f"must specify '{field}' in step {i} of ensemble '{name}'"
                yield RuleViolation(path, message, "model_name, input_map and output_map", f"add {field}")
        for key, tensor in step.output_map.items():
            if tensor in produced:
                message = (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step {i}"
                )
                yield RuleViolation((*path, "output_map", key), message, "a name of its own", "rename one of them")
            produced.add(tensor)


def _flow(config: ModelConfig, scheduling: EnsembleScheduling) -> Iterator[RuleViolation]:
    """Yield unused inputs, and outputs that are never produced."""
    steps, name = scheduling.step, config.name
    consumed = {tensor for step in steps for tensor in step.input_map.values()}
    producers = {tensor: i for i, step in enumerate(steps) for tensor in step.output_map.values()}
    for i, input_tensor in enumerate(config.input):
        if input_tensor.name not in consumed:
            message = f"ensemble input '{input_tensor.name}' for ensemble {name} is not used"
            yield RuleViolation(("input", i), message, "a step with it in its input_map", "use or remove it")
    ready = _ready(config, scheduling)
    for i, output_tensor in enumerate(config.output):
        if output_tensor.name not in consumed | producers.keys():
            message = f"ensemble output '{output_tensor.name}' for ensemble {name} is not used"
            yield RuleViolation(("output", i), message, "a step with it in its output_map", "make or remove it")
        elif output_tensor.name not in ready:
            message, reason = (
                f"output '{output_tensor.name}' for ensemble '{name}' is not written",
                _missing(output_tensor.name, producers, config),
            )
            missing = f": at least one of its depending tensors, '{reason}', is not connected" if reason else ""
            yield RuleViolation(("output", i), message + missing, "a step that makes it", "connect it")


def _ready(config: ModelConfig, scheduling: EnsembleScheduling) -> set[str]:
    """Return the tensors that can be produced from the inputs."""
    steps, left = scheduling.step, [t.name for t in config.input]
    waits = [set(step.input_map.values()) for step in steps]
    wanting: dict[str, list[int]] = {}
    for i, tensors in enumerate(waits):
        for tensor in tensors:
            wanting.setdefault(tensor, []).append(i)
    ready: set[str] = set()
    while left:
        tensor = left.pop()
        if tensor in ready:
            continue
        ready.add(tensor)
        for i in wanting.get(tensor, ()):
            waits[i].discard(tensor)
            if not waits[i]:
                left.extend(steps[i].output_map.values())
    return ready


def _unused(config: ModelConfig, scheduling: EnsembleScheduling) -> Iterator[RuleViolation]:
    """Yield unused tensors of an ensemble whose outputs are all produced."""
    steps = scheduling.step
    consumed = {tensor for step in steps for tensor in step.input_map.values()}
    producers = {tensor: i for i, step in enumerate(steps) for tensor in step.output_map.values()}
    available = producers.keys() | {t.name for t in config.input}
    for tensor in sorted((consumed | producers.keys()) - {t.name for t in config.output}):
        if tensor not in available or tensor not in consumed:
            message = f"ensemble tensor '{tensor}' is unused in ensemble '{config.name}'"
            expected = "a step that wants it" if tensor in available else "a step, or an input, that makes it"
            yield RuleViolation((_TOP, "step", producers.get(tensor, 0)), message, expected, "connect or remove it")


def _missing(tensor: str, producers: dict[str, int], config: ModelConfig) -> str:
    """Return the first dependency of `tensor` without a producer; "" if that is `tensor` itself."""
    assert config.ensemble_scheduling is not None
    inputs, visited, at = {t.name for t in config.input}, {tensor}, tensor
    while at in producers:
        before = config.ensemble_scheduling.step[producers[at]].input_map.values()
        more = [t for t in before if t not in visited and t not in inputs]
        if not more:
            break
        at = min(more, key=lambda t: t in producers)  # tensors without a producer first
        visited.add(at)
    return at if at != tensor else ""
