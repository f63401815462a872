"""Reference of convolution."""

import numpy as np

from millrace.kernels.arrays import Array


def convolution(
    x: Array, weight: Array, bias: Array | None, stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int], groups: int,
) -> Array:  # fmt: skip
    """Cross-correlate, as torch.nn.functional.conv2d: x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O,)."""
    n_outputs, width, kh, kw = weight.shape
    padded = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    oh, ow = ((padded.shape[2 + i] - (k - 1) * dilation[i] - 1) // stride[i] + 1 for i, k in enumerate((kh, kw)))
    y = np.zeros((x.shape[0], n_outputs, oh, ow))
    each = n_outputs // groups
    for ky in range(kh):
        for kx in range(kw):
            top, left = ky * dilation[0], kx * dilation[1]
            part = padded[
                :,
                :,
                top : top + (oh - 1) * stride[0] + 1 : stride[0],
                left : left + (ow - 1) * stride[1] + 1 : stride[1],
            ]
            for g in range(groups):
                own = part[:, g * width : (g + 1) * width]
                y[:, g * each : (g + 1) * each] += np.einsum(
                    "nchw,oc->nohw", own, weight[g * each : (g + 1) * each, :, ky, kx]
                )
    return y if bias is None else y + bias[:, None, None]
