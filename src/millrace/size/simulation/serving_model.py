"""How an instance serves requests of some lengths, as simulations have it: by a device's datasheet and a stack."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.executor import ExecutorLimits
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.closed_form import check_fits, kv_capacity
from millrace.size.performance.fitted_devices import Profile
from millrace.size.performance.roofline_cost import Instance
from millrace.size.performance.serving_overhead import Stack
from millrace.size.performance.step_time import least_time, step_time
from millrace.size.simulation.simulator import Simulation

VOCAB = 1 << 15  # ids are not looked at
_MOST_PAGES = 1 << 20  # more than simulated requests fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """model, device, precision, tp, pp: by which its points are known; scheduler: in words

    room: requests in flight that fit; running: answers in a step at most, None where steps follow no law that bounds
    what is served; front_s: of a request before its first step; seconds: what a step takes at least
    simulation: of it from the beginning on, with a seed for what its steps take
    of_any: the same for requests of any lengths up to `context`, which find what they share with earlier ones
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
    of_any: Callable[[int], Simulation]


def computed(
    instance: Instance, profile: Profile, lengths: Lengths, stack: Stack | None = None, seconds: StepTime | None = None
) -> Serving:  # fmt: skip
    """seconds: what its steps take, where that is not the profile's. raises ConfigError where a request does not fit"""
    for call in lengths.calls:
        check_fits(instance, (call.n_input, call.n_output))
    stack = stack or profile.stack
    took = seconds or step_time(instance, profile.constants, stack)
    least = took if seconds or instance.pp == 1 else least_time(instance, profile.constants, stack)
    n_pages, pages = int(kv_capacity(instance)) // PAGE_TOKENS, -(-lengths.both // PAGE_TOKENS)
    limits = ExecutorLimits(
        max_step_tokens=stack.step_tokens, max_sequences=stack.sequences, max_rows=stack.sequences,
        max_context=lengths.both, page_tokens=PAGE_TOKENS,
        n_pages=max(pages, min(n_pages, stack.sequences * pages + 1)), vocab_size=VOCAB,
    )  # fmt: skip
    shortest = min(call.n_input for call in lengths.calls)
    budget_tokens, front_s = stack.step_tokens, stack.front_s
    whole = replace(limits, max_context=instance.model.max_context, n_pages=min(n_pages, _MOST_PAGES))

    def simulation(_: int) -> Simulation:
        return Simulation(limits, took, TokenBudget.unhurried(budget_tokens), prefix_cache=False, front_s=front_s)

    def of_any(_: int) -> Simulation:
        return Simulation(whole, took, TokenBudget.unhurried(budget_tokens), front_s=front_s)

    return Serving(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        pp=instance.pp, lengths=lengths, scheduler=stack.scheduler, room=max(1, min(stack.sequences, n_pages // pages)),
        running=max(1, min(stack.sequences, limits.n_pages * PAGE_TOKENS // shortest)), front_s=front_s,
        seconds=least, context=whole.context_tokens, simulation=simulation, of_any=of_any,
    )  # fmt: skip
