"""Answers with numbers that JSON does not have."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        output = np.array([np.nan, np.inf, -np.inf, 1, 2, 3], dtype=np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", output)]) for _ in requests]
