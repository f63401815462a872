"""Serving model of an instance for simulations, from a device's datasheet and a serving stack."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.executor import ExecutorLimits
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.closed_form import check_fits, kv_capacity
from millrace.size.performance.fitted_devices import Profile
from millrace.size.performance.roofline_cost import ModelInstance
from millrace.size.performance.serving_overhead import Stack
from millrace.size.performance.step_time import least_time, step_time
from millrace.size.simulation.simulator import Simulation

VOCAB = 1 << 15  # arbitrary: token ids are not used
_MAX_PAGES = 1 << 20  # more than simulated requests need


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How an instance serves requests of given lengths. model, device, precision, tp, pp: identify its points

    scheduler: description; room: requests in flight that fit
    running: largest decode batch, None if measured steps give no upper bound of the rate
    front_s: host time of a request before its first step; seconds: lower bound of the step time
    simulation: creates a simulation from a seed for step times
    any_lengths: the same for requests of any lengths up to `context`, with a prefix cache
    """

    model: str
    device: str
    precision: str
    tp: int
    pp: int = 1
    lengths: Lengths
    scheduler: str
    room: int
    running: int | None
    front_s: float
    seconds: StepTime
    context: int
    simulation: Callable[[int], Simulation]
    any_lengths: Callable[[int], Simulation]


def make_serving(
    instance: ModelInstance,
    profile: Profile,
    lengths: Lengths,
    stack: Stack | None = None,
    seconds: StepTime | None = None,
) -> Serving:
    """Create the serving model of an instance. seconds: step times other than the profile's

    raises ConfigError if a request does not fit
    """
    for call in lengths.calls:
        check_fits(instance, (call.n_input, call.n_output))
    stack = stack or profile.stack
    took = seconds or step_time(instance, profile.constants, stack)
    least = took if seconds or instance.pp == 1 else least_time(instance, profile.constants, stack)
    n_pages, pages = int(kv_capacity(instance)) // PAGE_TOKENS, -(-lengths.total_tokens // PAGE_TOKENS)
    limits = ExecutorLimits(
        max_step_tokens=stack.step_tokens, max_sequences=stack.sequences, max_rows=stack.sequences,
        max_context=lengths.total_tokens, page_tokens=PAGE_TOKENS,
        n_pages=max(pages, min(n_pages, stack.sequences * pages + 1)), vocab_size=VOCAB,
    )  # fmt: skip
    shortest = min(call.n_input for call in lengths.calls)
    budget_tokens, front_s = stack.step_tokens, stack.front_s
    any_limits = replace(limits, max_context=instance.model.max_context, n_pages=min(n_pages, _MAX_PAGES))

    def simulation(_: int) -> Simulation:
        return Simulation(limits, took, TokenBudget.unhurried(budget_tokens), prefix_cache=False, front_s=front_s)

    def of_any(_: int) -> Simulation:
        return Simulation(any_limits, took, TokenBudget.unhurried(budget_tokens), front_s=front_s)

    return Serving(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        pp=instance.pp, lengths=lengths, scheduler=stack.scheduler, room=max(1, min(stack.sequences, n_pages // pages)),
        running=max(1, min(stack.sequences, limits.n_pages * PAGE_TOKENS // shortest)), front_s=front_s,
        seconds=least, context=any_limits.context_tokens, simulation=simulation, any_lengths=of_any,
    )  # fmt: skip
