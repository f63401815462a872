"""Its first request fails, later ones are answered with their input."""

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.seen = 0

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.seen == 0:
                error = pb_utils.TritonError("An error occurred during execution")
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            else:
                array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]), flags=FINAL)
            self.seen += 1
