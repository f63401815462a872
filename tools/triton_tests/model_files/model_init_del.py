"""Counts how often it is initialized and finalized, in files of its folder; sleeps as others of them say."""

import sys
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).parents[1]))

from util import get_delay, inc_count


class TritonPythonModel:
    def initialize(self, args):
        inc_count("initialize")
        time.sleep(get_delay("initialize"))

    def execute(self, requests):
        time.sleep(get_delay("infer"))
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]

    def finalize(self):
        inc_count("finalize")
