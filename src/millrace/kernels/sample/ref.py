"""Reference of sampling, in float64: vLLM's order, and the native executor's counter-based generator."""

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.arrays import Array

_ROUNDS = 10


def uniform(seed: int, choice: int, position: int) -> float:
    """Return 53 bits in [0, 1): Philox 4x32-10 (Salmon et al., SC 2011), key seed, counter (position, choice, 0, 0)."""
    mask = 0xFFFFFFFF
    counter = [position & mask, choice & mask, 0, 0]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(_ROUNDS):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & mask, a >> 32 ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return float((counter[0] << 32 | counter[1]) >> 11) * 2.0**-53


def probabilities(
    logits: Array, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> NDArray[np.float64]:
    """Map logits (V,) -> (V,): temperature, min_p, top_k, then top_p over the rest; ties go to the lower id."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(p)), -p))
    order = order[p[order] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(p[order]) / p[order].sum()
        order = order[: int(np.searchsorted(mass, top_p - 1e-12)) + 1]
    allowed = np.zeros_like(p)
    allowed[order] = p[order]
    result: NDArray[np.float64] = allowed / allowed.sum()
    return result


def draw(p: NDArray[np.float64], u: float) -> int:
    """Return the token whose interval of [0, 1) contains u, ids ascending."""
    allowed = np.flatnonzero(p)
    at = int(np.searchsorted(np.cumsum(p[allowed]), u, side="right"))
    return int(allowed[min(at, len(allowed) - 1)])


def unpacked(mask: NDArray[np.uint32], vocab: int) -> NDArray[np.bool_]:
    """Unpack a mask (ceil(V / 32),) -> (V,): bit t % 32 of word t / 32 says whether token t may be drawn."""
    tokens = np.arange(vocab)
    allowed: NDArray[np.bool_] = (mask[tokens // 32] >> (tokens % 32).astype(np.uint32) & 1).astype(np.bool_)
    return allowed


def penalised(
    logits: Array,
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
    repetition: float,
    presence: float,
    frequency: float,
) -> NDArray[np.float64]:
    """Apply penalties: repetition to prompt and output (x / r if x > 0, else x * r), others to the output."""
    y = logits.astype(np.float64)
    unique_ids = np.unique(np.concatenate([prompt, output]))
    y[unique_ids] = np.where(y[unique_ids] > 0, y[unique_ids] / repetition, y[unique_ids] * repetition)
    times = np.bincount(output, minlength=len(y)).astype(np.float64)
    result: NDArray[np.float64] = y - presence * (times > 0) - frequency * times
    return result
