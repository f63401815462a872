"""Reference of route: the routing schemes of mixtures of experts."""

import numpy as np

from millrace.checkpoint.config.routing import Routing
from millrace.kernels.arrays import Array, IntArray


def route(logits: Array, bias: Array | None, routing: Routing) -> tuple[Array, IntArray]:
    """logits (T, E), bias (E,) of the choice alone -> weights and numbers of the experts, both (T, chosen), best first.

    Of equal scores the expert with the lower number is first. Computed in the precision of `logits`.
    """
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits, routing)
    if routing.scoring == "softmax":
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    if routing.chosen_groups < routing.groups:
        by_group = choice.reshape(len(choice), routing.groups, -1)
        best = np.sort(by_group, axis=2)[:, :, -routing.group_best :].sum(axis=2)
        open_groups = np.argsort(-best, axis=1, kind="stable")[:, : routing.chosen_groups]
        is_open = np.zeros(best.shape, bool)
        np.put_along_axis(is_open, open_groups, True, axis=1)
        choice = np.where(is_open[:, :, None], by_group, -np.inf).reshape(choice.shape)
    experts = np.argsort(-choice, axis=1, kind="stable")[:, : routing.chosen].astype(np.int32)
    weights: Array = np.take_along_axis(scores, experts, axis=1)
    if routing.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + routing.epsilon)
    return weights * routing.scale, experts


def _sparsemixer(logits: Array, routing: Routing) -> tuple[Array, IntArray]:
    left, weights, experts = logits.copy(), [], []
    for _ in range(routing.chosen):
        expert, top = left.argmax(axis=1), left.max(axis=1, keepdims=True)
        is_close = (top - logits) / np.maximum(np.abs(logits), top) <= routing.epsilon
        shares = np.where(is_close, np.exp(left - top), 0)
        weights.append(1 / shares.sum(axis=1))
        experts.append(expert.astype(np.int32))
        np.put_along_axis(left, expert[:, None], -np.inf, axis=1)
    return np.stack(weights, axis=1) * routing.scale, np.stack(experts, axis=1)
