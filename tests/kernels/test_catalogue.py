"""Kernels and operators are found by their folders; who names one that is not there is told so."""

from pathlib import Path

import numpy as np
import pytest

import millrace.kernels
from millrace.errors import GraphError
from millrace.graph.graph_json import graph_table, read_graph
from millrace.kernels.catalogue import kernels, numbered, operators
from millrace.model.module import Module, Signature, Weights, trace_model
from millrace.model.tensor import Tensor

FOLDER = Path(millrace.kernels.__file__).parent


class Calling(Module):
    """One operator, by its name."""

    signature = Signature({"x": ("rows", 8)}, ("y",))

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return x.trace.add(self.operator, (x,), {"eps": 1e-12})


NONE = Weights({}, lambda name: np.zeros(0))


def test_every_folder_is_found() -> None:
    declared = sorted(path.parent.name for path in FOLDER.glob("*/declare.py"))
    assert [k.name for k in kernels()] == declared and "matmul" in declared
    assert [numbered()[name][0] for name in declared] == list(range(len(declared)))
    for name in declared:
        assert (FOLDER / name / "native.hpp").is_file()
        listed = (FOLDER / name / "op.py").read_text()
        assert f'writer.add("{name}"' in listed, f"no operator beside {name} is lowered to it"


def test_operators_complete_what_a_graph_must_know() -> None:
    assert {name: operator.name for name, operator in operators().items()} == {name: name for name in operators()}
    assert {n for n, o in operators().items() if o.fused} == {
        "convert", "expert_gated_linear", "gated_linear", "rescore", "rope_attention",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("normalize", 'is no operator.*did you mean "normalise"'),
        ("convert", "is written by the compiler's passes only"),
        ("x" * 10000, "is no operator"),
    ],
)
def test_only_operators_that_there_are(name: str, says: str) -> None:
    with pytest.raises(GraphError, match=f"(?s){says}") as error:
        trace_model(Calling(name), NONE, operators())
    assert len(str(error.value)) < 600
    table = graph_table(trace_model(Calling("normalise"), NONE, operators()))
    table["nodes"][0]["op"] = name
    with pytest.raises(GraphError, match=f"(?s){says}"):
        read_graph(table, operators())
