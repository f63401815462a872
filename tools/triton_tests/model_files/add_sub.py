"""OUTPUT0 is the sum and OUTPUT1 the difference of two inputs; strings are decimal numbers."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        delay = self.config.get("parameters", {}).get("execute_delay_ms", {}).get("string_value", "0")
        self.delay_s = int(delay) / 1000

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (self.number(request, one["name"]) for one in self.config["input"])
        tensors = []
        for output, value in zip(self.config["output"], (a + b, a - b), strict=True):
            if output["data_type"] == "TYPE_STRING":
                value = value.astype(str).astype(np.object_)
            else:
                value = value.astype(pb_utils.triton_string_to_numpy(output["data_type"]))
            tensors.append(pb_utils.Tensor(output["name"], value))
        return pb_utils.InferenceResponse(tensors)

    def number(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return np.array([5], np.int32)
        array = tensor.as_numpy()
        return array.astype(np.bytes_).astype(np.int32) if array.dtype == np.object_ else array
