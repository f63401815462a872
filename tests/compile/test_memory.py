"""The memory plan: buffers that live together never overlap, and the plan is near what any plan needs."""

import random

import pytest

from millrace.compile.lower_cpu.memory import ALIGN, Buffer, plan_memory


def alive_together(a: Buffer, b: Buffer) -> bool:
    return any(step in range(b.first, b.last + 1) for step in range(a.first, a.last + 1))


@pytest.mark.parametrize("seed", range(30))
def test_no_two_living_buffers_overlap(seed: int) -> None:
    rng = random.Random(seed)
    buffers = []
    for i in range(rng.randint(1, 40)):
        first = rng.randint(0, 30)
        buffers.append(Buffer(str(i), rng.choice([1, 63, 64, 65, 1000, 4096]), first, first + rng.randint(0, 8)))
    plan = plan_memory(buffers)
    for i, a in enumerate(buffers):
        assert plan.offsets[i] % ALIGN == 0 and plan.offsets[i] + a.nbytes <= plan.total_bytes
        for j, b in enumerate(buffers[:i]):
            apart = plan.offsets[i] + a.nbytes <= plan.offsets[j] or plan.offsets[j] + b.nbytes <= plan.offsets[i]
            assert apart or not alive_together(a, b), f"{a} and {b}"
    needed = max(sum(-(-b.nbytes // ALIGN) * ALIGN for b in buffers if b.first <= s <= b.last) for s in range(40))
    assert plan.lower_bound == needed <= plan.total_bytes <= 2 * needed


def test_a_chain_needs_two_buffers() -> None:
    plan = plan_memory([Buffer(str(i), 640, i, i + 1) for i in range(10)])
    assert plan.total_bytes == plan.lower_bound == 1280


def test_nothing_needs_nothing() -> None:
    assert plan_memory([]).total_bytes == 0
