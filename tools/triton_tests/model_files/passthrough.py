"""Each output is the input at its place; `execute_delay_ms` of the configuration's parameters is slept first."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.names = list(
            zip([i["name"] for i in config["input"]], [o["name"] for o in config["output"]], strict=False)
        )
        delay = config.get("parameters", {}).get("execute_delay_ms", {}).get("string_value", "0")
        self.delay_s = int(delay) / 1000

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = []
        for name, output in self.names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            array = np.zeros((1,), np.float32) if tensor is None else tensor.as_numpy()
            tensors.append(pb_utils.Tensor(output, array))
        return pb_utils.InferenceResponse(tensors)
