"""How a layer with experts chooses those of each row."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the experts of a row follow from its logits.

    chosen: experts per row
    scoring: "softmax" (arXiv:2101.03961), "sigmoid" (arXiv:2412.19437) or "sparsemixer" (arXiv:2409.12136), in which
        each expert's weight is its share among the logits close to it
    normalise: divide weights by their sum + epsilon; scale: multiply them by it in the end
    groups: number of groups of experts, of which `chosen_groups` are open to a row: those with the largest sums of
        their `group_best` best scores (arXiv:2405.04434 section 2.1.2)
    """

    chosen: int
    scoring: str = "softmax"
    normalise: bool = False
    scale: float = 1.0
    epsilon: float = 0.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
