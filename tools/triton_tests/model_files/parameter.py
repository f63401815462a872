"""Tells the parameters of its request: `key` and `value`, both strings."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            parameters = json.loads(request.parameters())
            keys = np.array(list(parameters), dtype=np.object_)
            values = np.array([str(value) for value in parameters.values()], dtype=np.object_)
            tensors = [pb_utils.Tensor("key", keys), pb_utils.Tensor("value", values)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
