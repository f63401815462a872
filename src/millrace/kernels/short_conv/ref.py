"""Reference of short_conv, for one sequence."""

import numpy as np

from millrace.kernels.arrays import Array


def short_conv(x: Array, weight: Array, bias: Array | None) -> Array:
    """Causal convolution of each column separately (cross-correlation, as torch.nn.Conv1d with groups=N).

    x (taps - 1 + T, N), whose first taps - 1 rows precede the sequence's new ones; weight (N, taps); bias (N,) -> (T,
    N)
    """
    taps = weight.shape[1]
    T = x.shape[0] - taps + 1
    y: Array = np.stack([x[j : j + T] * weight[:, j] for j in range(taps)]).sum(axis=0)
    return y if bias is None else y + bias
