"""Answers with fixed strings: of every other request with an empty tensor."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0

    def execute(self, requests):
        responses = []
        for _ in requests:
            array = np.array(["123456"], dtype=np.object_) if self.calls % 2 == 0 else np.array([], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
            self.calls += 1
        return responses
