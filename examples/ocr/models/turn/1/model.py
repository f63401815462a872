"""Lines that the classifier is sure stand on their heads, turned, as numbers from -1 to 1; beside a line are zeros."""

import numpy as np
import triton_python_backend_utils as pb_utils

SURE = 0.9


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    names = ("LINE", "WIDTH", "FACING")
    lines, widths, facing = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names)
    pixels = np.zeros(lines.shape, np.float32)
    for i, width in enumerate(widths):
        line = lines[i, :, :width]
        pixels[i, :, :width] = (line[::-1, ::-1] if facing[i, 1] > SURE else line) / 127.5 - 1
    return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels.transpose(0, 3, 1, 2))])
