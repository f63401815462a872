"""What is offered, by what the product itself calls; and static batches, as engines alone are measured."""

from collections.abc import Sequence

from millrace.errors import ConfigError
from millrace.size.load.token_lengths import Lengths, ModelCall, RequestWork
from millrace.size.performance.fitted_devices import Profile, profile
from millrace.size.performance.operating_point import FigureSource, Limits, OperatingPoint, Waits
from millrace.size.performance.operating_points import Offers, offers
from millrace.size.performance.roofline_cost import ModelInstance
from millrace.size.performance.serving_overhead import Stack
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import make_serving
from millrace.size.simulation.simulated_capacity import Replicas, add_simulated


def work_of(lengths: tuple[float, float] | Lengths) -> RequestWork:
    n_in, n_out = (lengths.n_input, lengths.n_output) if isinstance(lengths, Lengths) else lengths
    return RequestWork((ModelCall("request", n_in, n_out),), ())


def analytic_points(
    model: str, devices: Sequence[str], precisions: Sequence[str], lengths: tuple[float, float] | Lengths
) -> list[OperatingPoint]:
    asked = HardwareSettings(hardware=tuple(devices), precision=tuple(precisions))
    return list(offers(model, asked, work_of(lengths)).points)


class _Served(Replicas):
    """With another stack than the profiles'."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._stack = stack

    def get(self, offers: Offers, point: OperatingPoint, lengths: Lengths) -> Replica:
        instance = offers.instance(point)
        assert instance is not None
        key = point.device, point.precision, point.tp, point.pp, lengths
        known = profile(instance.device, point.precision)
        return self._replicas.setdefault(key, Replica(make_serving(instance, known, lengths, self._stack)))


def simulated_points(
    model: str, devices: Sequence[str], precisions: Sequence[str], lengths: Lengths, limits: Limits,
    stack: Stack | None = None, closed: bool = False,
) -> list[OperatingPoint]:  # fmt: skip
    asked, work = HardwareSettings(hardware=tuple(devices), precision=tuple(precisions)), work_of(lengths)
    found, replicas = offers(model, asked, work), Replicas() if stack is None else _Served(stack)
    points: list[OperatingPoint] = []
    why: ConfigError | None = None
    for name in found.names:
        try:
            points += add_simulated(found.for_device(name), asked, work, limits, replicas, closed).points
        except ConfigError as error:
            why = error
    if not points and why is not None:
        raise why
    return [point for point in points if point.source == FigureSource.SIMULATED]


def static_batch(
    instance: ModelInstance, profile: Profile, lengths: tuple[float, float], batch: int, stack: Stack | None = None
) -> OperatingPoint:
    """All requests start and end together. Sequences of equal lengths are read as in the engine's own runs."""
    stack = stack or profile.stack
    n_in, n_out = lengths
    prefill_s = stack.prefill * profile.constants.prefill_s(instance, [n_in] * batch)
    step_s = stack.decode * profile.constants.decode_s(instance, batch, n_in + n_out / 2) + stack.host_s * batch
    e2e_s = prefill_s + n_out * step_s
    return OperatingPoint(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        input_tokens=n_in, output_tokens=n_out, concurrency=batch, rate=batch / e2e_s,
        mean=Waits(prefill_s, step_s, e2e_s), p95=None, source=FigureSource.ANALYTIC,
    )  # fmt: skip
