"""The operator convert, which stores rows as bfloat16 or int8 groups, and checks which kernels can do so themselves."""

from millrace.graph.shape_rules import same_shape
from millrace.graph.types import Node
from millrace.kernels.declare import RowFormat
from millrace.kernels.operand_places import View
from millrace.kernels.operators import EvaluationContext, KernelOperator, Params, ProgramWriter, StoredValue
from millrace.kernels.row_storage import Storage, storage_of


def _reference(node: Node, values: EvaluationContext) -> StoredValue:
    return values.stored(values.rows(node.inputs[0]), node)


def packing_params(x: View, y: View, n: int) -> Params:
    """Return the parameters of kernels that write rows in the format of `y`: n elements of each row of `x`."""
    return {
        "rows": x.rows, "n": n, "x_stride": x.row_floats, "y_stride": y.row_bytes, "format": y.storage.format,
        "group": y.storage.group,
    }  # fmt: skip


def packs_rows(node: Node, storage: Storage) -> bool:
    """Return whether kernels with `packing_params` can write a storage: any, one row of a matrix at a time."""
    return len(node.output.shape) == 2


def packs_elements(node: Node, storage: Storage) -> bool:
    """Return whether kernels can write bfloat16 element by element: rows of whole vectors, groups without gaps."""
    return storage.format == RowFormat.BF16 and storage.group % 8 == 0 and node.output.width % 16 == 0


def _lower(node: Node, writer: ProgramWriter) -> None:
    x, storage = writer.view(node.inputs[0]), storage_of(node)
    y = writer.new(node.output, f"{storage}", storage)
    writer.add("convert", {"x": x, "y": y}, packing_params(x, y, node.output.width), node, str(storage))


CONVERT = KernelOperator(
    name="convert", inputs=(1, 1), attrs=frozenset({"storage"}), fused=True, shapes=same_shape, reference=_reference,
    lower=_lower, row_wise=True,
)  # fmt: skip
OPERATORS = (CONVERT,)
