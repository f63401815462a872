"""Repeats PROMPT as TEXT; parameters say how often, how slowly and whether it fails in the end."""

import json
import time

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, json.loads(request.parameters()), request.get_response_sender())

    def answer(self, request, parameters, sender):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", prompt)])
        if not pb_utils.get_input_tensor_by_name(request, "STREAM").as_numpy().item():
            sender.send(response, flags=FINAL)
            return
        for _ in range(parameters.get("REPETITION", 1)):
            time.sleep(parameters.get("DELAY", 0))
            if sender.is_cancelled():
                break
            sender.send(response)
        if parameters.get("FAIL_LAST"):
            code = parameters.get("ERROR_CODE", "INTERNAL")
            error = pb_utils.TritonError("An Error Occurred", getattr(pb_utils.TritonError, code))
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        else:
            sender.send(flags=FINAL)
