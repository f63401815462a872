"""A guard: the cosine between a question and the nearest of those that are not wanted."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.limit = float(parameters["LIMIT"]["string_value"])
        self.unwanted = Path(__file__).with_name("unwanted.txt").read_text(encoding="utf-8").splitlines()
        self.vectors = None  # of the unwanted: other models may be asked from the first request on

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        question = pb_utils.get_input_tensor_by_name(request, "QUESTION").as_numpy()
        if self.vectors is None:
            self.vectors = vectors([text.encode() for text in self.unwanted])
        nearness = np.max(self.vectors @ vectors(question)[0], keepdims=True)
        made = {"NEARNESS": nearness, "REFUSED": nearness > self.limit}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()])


def vectors(texts):
    """(texts, width), each of length 1. raises TritonModelException"""
    tensor = pb_utils.Tensor("text_input", np.array(texts, dtype=object))
    asking = pb_utils.InferenceRequest(model_name="encoder", requested_output_names=["embedding"], inputs=[tensor])
    response = asking.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"encoder: {response.error().message()}")
    return pb_utils.get_output_tensor_by_name(response, "embedding").as_numpy()
