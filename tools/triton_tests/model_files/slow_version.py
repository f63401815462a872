"""Its version 1 takes ten seconds to load."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(10 if args["model_version"] == "1" else 0)

    def execute(self, requests):
        one = np.ones([1], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", one)]) for _ in requests]
