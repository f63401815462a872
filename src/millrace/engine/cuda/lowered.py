"""A graph lowered for a GPU: what `compile/lower_gpu` decided about it, before a weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.graph.types import Graph, Node, Value

if TYPE_CHECKING:  # PyTorch is imported where a GPU is at work
    from millrace.kernels.matmul.coded import RowQuantization


@dataclass(frozen=True, slots=True)
class Placement:
    """Which constants the device holds in which form.

    coded: products whose weights are codes, with the node that made the rows that they meet
    narrow: constants in the engine's type; wide: in float32, or int32
    """

    coded: Mapping[Node, Node | None]
    narrow: tuple[Value, ...]
    wide: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Fusions:
    """What lies between two products and is one kernel.

    norms: of products that are added to the residual stream, the norm that reads the sum
    codings: of rows that only products of 8-bit rows read, the coding in which they are written at once
    """

    norms: Mapping[Node, Node]
    codings: "Mapping[Value, RowQuantization]"


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """graph: after the passes of `pipeline.gpu`, which say how each product's weights are coded

    dtype: of activations, and of weights that are not coded: fp32, tf32, bf16, fp16
    e4m3: coded products whose rows, where they are 16-bit floats, become E4M3, each by its own scale
    """

    graph: Graph
    dtype: str
    e4m3: frozenset[Node]
    placement: Placement
    fusions: Fusions
