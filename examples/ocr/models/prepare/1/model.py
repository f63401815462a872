"""An image file as a page, (height, width, 3) of blue, green, red, and as the detector wants it."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

SHORT_SIDE = 736  # of what the detector sees: small letters are found from there on
LONG_SIDE = 2016  # a wider page is seen smaller, or its pixels would be too many
STEP = 32  # the detector halves a side five times


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    data = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
    page = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if page is None:
        error = pb_utils.TritonError("IMAGE holds no image: PNG, JPEG, WebP, ...", pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    tensors = (pb_utils.Tensor("PAGE", page), pb_utils.Tensor("PIXELS", pixels(page)))
    return pb_utils.InferenceResponse(tensors)


def pixels(page):
    """(1, 3, h, w) float32 from -1 to 1; h and w are multiples of STEP."""
    h, w = page.shape[:2]
    scale = min(max(1.0, SHORT_SIDE / min(h, w)), LONG_SIDE / max(h, w))
    size = [max(STEP, round(int(side * scale) / STEP) * STEP) for side in (w, h)]
    seen = cv2.resize(page, size).astype(np.float32)
    return (seen / 127.5 - 1).transpose(2, 0, 1)[None]
