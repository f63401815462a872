"""Products in E4M3 on a GPU, W8A8: a scale for each channel of the weights and for each row of activations."""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # that E4M3 has


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """data (R, K) E4M3, scales (R,) float32: a row is its data times its scale."""

    data: Tensor
    scales: Tensor


def quantised(x: Tensor) -> Fp8Rows:
    """x (R, K): each row's largest magnitude becomes E4M3's largest. What is not finite stays not finite."""
    found = x.float()
    scales = (found.abs().amax(1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return Fp8Rows((found / scales[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scales)
