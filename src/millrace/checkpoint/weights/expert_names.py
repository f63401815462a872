"""Names of the tensors of experts, which are stacked into one matrix each."""

import re

_NUMBER = re.compile(r"\.experts\.\d+\.")


def stack_name(name: str) -> str:
    """Return the name of a stack of experts' tensors: `layers.0.mlp.experts.*.up_proj.weight`; other names as is."""
    return _NUMBER.sub(".experts.*.", name, count=1)
