"""Answers with its input; `ready` of the configuration's parameters says what is_model_ready does."""

import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.ready = json.loads(args["model_config"])["parameters"]["ready"]["string_value"]

    def is_model_ready(self):
        if self.ready == "raises":
            raise RuntimeError("not to be asked")
        if self.ready == "late":
            time.sleep(7)
        return {"false": False, "text": "true"}.get(self.ready, True)

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
