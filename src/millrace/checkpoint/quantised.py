"""A matrix as a checkpoint or an engine may hold it: integers with a float16 scale per output and group of inputs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """codes (N, K) int8 in -2^(bits-1) .. 2^(bits-1)-1, scales (N, G) float16: w ~ codes * scales of their group."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]
    group: int
    bits: int

    def dequantise(self) -> NDArray[np.float64]:
        wide = np.repeat(self.scales.astype(np.float64), self.group, axis=1)
        return self.codes * wide[:, : self.codes.shape[1]]
