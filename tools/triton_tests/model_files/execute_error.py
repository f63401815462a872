"""Fails for the first and the third request of a batch."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for i, request in enumerate(requests):
            if i in (0, 2):
                error = pb_utils.TritonError("An error occurred during execution")
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return responses
