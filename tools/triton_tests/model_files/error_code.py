"""Fails with the code that ERROR_CODE names."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.failed(request) for request in requests]

    def failed(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "ERROR_CODE").as_numpy().flatten()[0].decode()
        code = getattr(pb_utils.TritonError, name, None)
        if code is None:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"unrecognized error code: {name}"))
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"error code: {name}", code))
