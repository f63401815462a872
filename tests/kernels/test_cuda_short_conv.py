"""Short convolutions with a state, in Triton's interpreter and in plain PyTorch, beside the reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from millrace.kernels import torch_reference
from millrace.kernels.short_conv.ref import short_conv
from millrace.kernels.short_conv.slots import SequenceSlots

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("convolve", [torch_reference.short_conv, triton_kernels.short_conv], ids=["plain", "triton"])
@pytest.mark.parametrize(("n", "taps", "has_bias", "dtype"), [
    (300, 4, True, torch.float32), (24, 2, False, torch.float32), (40, 8, True, torch.float16),
])  # fmt: skip
def test_sequences_of_any_length(
    n: int, taps: int, has_bias: bool, dtype: torch.dtype, convolve: Callable[..., torch.Tensor]
) -> None:
    """One that begins, shorter ones than its taps, one slot that is read and written; what nobody reads is NaN."""
    rng, lengths, before, behind = np.random.default_rng(n), [5, 1, 2, 9], [-1, 3, 4, 0], [1, 3, 5, 2]
    starts, total = np.cumsum([0, *lengths]), sum(lengths)
    x, w, bias = (torch.from_numpy(rng.normal(size=size)).float() for size in ((total, n), (n, 1, taps), (n,)))
    states = torch.full((6, taps - 1, n), float("nan"), dtype=dtype)
    for slot in (0, 3, 4):
        states[slot] = torch.from_numpy(rng.normal(size=(taps - 1, n))).to(dtype)
    x, old = x.to(dtype), states.double().numpy()
    owner = torch.from_numpy(np.repeat(np.arange(4), lengths)).int()
    slots = SequenceSlots(owner, numbers(*starts.tolist()), numbers(*before), numbers(*behind))
    y = convolve(x, w, bias if has_bias else None, slots, states)
    for s in range(4):
        rows = x[starts[s] : starts[s + 1]].double().numpy()
        past = old[before[s]] if before[s] >= 0 else np.zeros((taps - 1, n))
        whole = np.concatenate([past, rows])
        want = short_conv(whole, w[:, 0].double().numpy(), bias.double().numpy() if has_bias else None)
        got, near = y[starts[s] : starts[s + 1]].double().numpy(), 1e-5 if dtype == torch.float32 else 1e-2
        np.testing.assert_allclose(got, want, atol=near)
        np.testing.assert_array_equal(states[behind[s]].double().numpy(), whole[len(rows) :])
    assert y.dtype == dtype
    for slot in (0, 4):
        np.testing.assert_array_equal(states[slot].double().numpy(), old[slot], "read, not written")
