"""Decoupled, and returns a response where None is due."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        array = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for _ in requests]
