"""Configurations of ensembles, and requests to any loaded model."""

from collections.abc import Mapping, Sequence

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.tensors import Array, output_datatype

# a model, its inputs' names with tensors, its outputs'
Link = tuple[str, Mapping[str, str], Mapping[str, str]]


def ensemble(
    inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[Link], *, kind: str = "INT32", dims: str = "4",
    max_batch: int = 8, more: str = "",
) -> str:  # fmt: skip
    said = "".join(
        f'step {{ model_name: "{model}" {_mapped("input_map", takes)} {_mapped("output_map", makes)} }}\n'
        for model, takes, makes in steps
    )
    tensors = "".join(
        f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}\n'
        for side, names in (("input", inputs), ("output", outputs))
        for name in names
    )
    return f'platform: "ensemble" max_batch_size: {max_batch}\n{tensors}\nensemble_scheduling {{\n{said} {more} }}\n'


def _mapped(field: str, pairs: Mapping[str, str]) -> str:
    return " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items())


def asking(model: Model, outputs: Sequence[str] = (), **arrays: Array) -> InferRequest:
    request = InferRequest({}, tuple(outputs))
    model.checker.attach_inputs(
        request, [RawInput(name, output_datatype(name, array), array.shape, array) for name, array in arrays.items()]
    )
    return request
