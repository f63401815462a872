"""What a decode step of an engine must at least read and compute, against what this machine was measured to do."""

from collections import Counter

from millrace.cli.tables import Tables
from millrace.machine.roofline import Bound, Roofline

# A product with 16-bit activations runs in bfloat16 arithmetic, whatever its weights are stored in.
_ARITHMETIC = {"w8a16": "bf16", "w4a16": "bf16"}


def decode_bound(tables: Tables, roofline: Roofline, n_sequences: int, n_context: int) -> Bound:
    """The least time of one decode step for `n_sequences` of `n_context` tokens each.

    It reads the weights of every matrix product once and every sequence's keys and values; it multiplies. Norms,
    activations, attention's arithmetic and sampling come on top of it, so no engine reaches it.
    """
    nbytes = n_sequences * n_context * tables.memory()["kv_bytes_per_token"]
    operations: Counter[str] = Counter()
    for step in tables.calls:
        if step.kernel == "matmul":
            nbytes += int(step.operands["w"]["bytes"])
            products = int(step.params["n"] * step.params["k"])
            operations[_ARITHMETIC.get(step.note, step.note)] += 2 * n_sequences * products
    return roofline.bound(nbytes, operations)
