"""What a graph has constant, on a device: each read once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.graph.types import DType, Graph, Node, Value
from millrace.kernels.matmul.coded import CodedRows, Matrix, weights
from millrace.kernels.matmul.op import codes_of, group_of, matrices_of, precision_of
from millrace.kernels.places import constant_of
from millrace.kernels.storage import storage_of

PRODUCTS = ("linear", "gated_linear")


@dataclass(frozen=True, slots=True)
class Loaded:
    """tensors: tables, biases and weights of products in the engine's type, others in float32

    coded: of products by node: codes and scales of each of their matrices
    """

    tensors: dict[Value, Tensor]
    coded: dict[Node, tuple[CodedRows, ...]]

    def matrices(self, node: Node) -> tuple[Matrix, ...]:
        """Of a product."""
        return self.coded.get(node) or tuple(self.tensors[w] for w in matrices_of(node))


def coded_products(graph: Graph) -> list[Node]:
    """Whose weights are codes."""
    return [n for n in graph.nodes if n.op in PRODUCTS and precision_of(n).coded]


def load(graph: Graph, dtype: torch.dtype, device: torch.device, given: Loaded | None = None) -> Loaded:
    """given: what is there already, and is not read

    raises CheckpointError for weights that are not finite, where they become codes
    """
    producers, held = graph.producers(), given or Loaded({}, {})
    coded = {
        n: held.coded[n] if n in held.coded else _coded(n, producers.get(n.inputs[0]), device)
        for n in coded_products(graph)
    }
    narrow = {w for n in graph.nodes if n.op in PRODUCTS and n not in coded for w in matrices_of(n)}
    narrow |= {n.inputs[1] for n in graph.nodes if n.op == "embedding"}
    narrow |= {n.inputs[2] for n in graph.nodes if n.op == "linear" and n.attrs.get("bias")}
    alone = {w for n in coded for w in matrices_of(n)} - narrow  # read as codes, and by nobody else
    tensors = {
        value: held.tensors[value] if value in held.tensors
        else _tensor(value, dtype if value in narrow else torch.float32, device)
        for value in graph.constants() if value not in alone
    }  # fmt: skip
    return Loaded(tensors, coded)


def _tensor(value: Value, dtype: torch.dtype, device: torch.device) -> Tensor:
    kind = np.int32 if value.dtype == DType.I32 else np.float32
    array = np.ascontiguousarray(constant_of(value).load()).astype(kind)
    return torch.from_numpy(array).to(device, torch.int32 if kind == np.int32 else dtype)


def _coded(node: Node, rows: Node | None, device: torch.device) -> tuple[CodedRows, ...]:
    """rows: what made those that its weights meet"""
    bits, group = precision_of(node).bits, group_of(node)
    transform = storage_of(rows).hadamard_group if rows else 0
    constants = [constant_of(w) for w in matrices_of(node)]
    return tuple(weights(codes_of(c, c.load, bits, group, transform), device) for c in constants)
