"""Answers with views of its input that are not contiguous."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            views = array.reshape([10, 2, 6, 5, 11]), array.T, np.transpose(array, [1, 0, 4, 2, 3])
            tensors = [pb_utils.Tensor(f"OUTPUT{i}", view) for i, view in enumerate(views)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
