"""Passages by how near their meaning is to a question's: cosines of an encoder's vectors."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

COUNT = 2  # passages, where a request does not say how many


class TritonPythonModel:
    def initialize(self, args):
        self.passages = Path(__file__).with_name("passages.txt").read_text(encoding="utf-8").splitlines()
        self.vectors = None  # of the passages: other models may be asked from the first request on

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        question = pb_utils.get_input_tensor_by_name(request, "QUESTION").as_numpy()
        asked = pb_utils.get_input_tensor_by_name(request, "COUNT")
        count = int(asked.as_numpy()[0]) if asked is not None else COUNT
        if self.vectors is None:
            self.vectors = vectors([passage.encode() for passage in self.passages])
        nearness = self.vectors @ vectors(question)[0]
        best = np.argsort(-nearness, kind="stable")[: max(0, count)]
        passages = np.array([self.passages[i].encode() for i in best], dtype=object)
        made = {"PASSAGE": passages, "NEARNESS": nearness[best]}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()])


def vectors(texts):
    """(texts, width), each of length 1. raises TritonModelException"""
    tensor = pb_utils.Tensor("text_input", np.array(texts, dtype=object))
    asking = pb_utils.InferenceRequest(model_name="encoder", requested_output_names=["embedding"], inputs=[tensor])
    response = asking.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"encoder: {response.error().message()}")
    return pb_utils.get_output_tensor_by_name(response, "embedding").as_numpy()
