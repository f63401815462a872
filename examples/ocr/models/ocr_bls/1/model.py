"""The models of this repository, asked one after the other: what an ensemble cannot say is an `if` and a loop here."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils

TOGETHER = 6  # lines that are recognised at a time: zeros beside the shorter ones cost as much as they do
LEAST_WIDTH = 320  # that the recogniser is given


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(_answer(request) for request in requests))


async def _answer(request):
    image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
    try:
        texts, scores, boxes = await read_page(image)
    except pb_utils.TritonModelException as error:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
    made = {"TEXT": texts, "SCORE": scores, "BOX": boxes}
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()])


async def read_page(image):
    """Texts (n,), how sure they are (n,), and where they stand (n, 4, 2)."""
    page, pixels = await ask("prepare", ["PAGE", "PIXELS"], IMAGE=image)
    (found,) = await ask("detector", ["sigmoid_0.tmp_0"], x=pixels)
    boxes, upright, lines, widths = await ask("cut", ["BOX", "UPRIGHT", "LINE", "WIDTH"], PAGE=page, FOUND=found)
    if not boxes.any():  # nothing was found
        return np.empty(0, object), np.empty(0, np.float32), np.empty((0, 4, 2), np.float32)
    by_width = np.argsort(widths, kind="stable")
    groups = [by_width[i : i + TOGETHER] for i in range(0, len(by_width), TOGETHER)]
    read = await asyncio.gather(*(read_lines(boxes[g], upright[g], lines[g], widths[g]) for g in groups))
    texts, scores, places = (np.concatenate(part) for part in zip(*read, strict=True))
    place = {box.tobytes(): i for i, box in enumerate(boxes)}
    in_order = sorted(range(len(places)), key=lambda i: place[places[i].tobytes()])
    return texts[in_order], scores[in_order], places[in_order]


async def read_lines(boxes, upright, lines, widths):
    (facing,) = await ask("classifier", ["save_infer_model/scale_0.tmp_1"], x=upright)
    narrow = lines[:, :, : max(LEAST_WIDTH, int(widths.max()))]
    (pixels,) = await ask("turn", ["PIXELS"], LINE=narrow, WIDTH=widths, FACING=facing)
    (characters,) = await ask("recogniser", ["softmax_11.tmp_0"], x=pixels)
    return await ask("read", ["TEXT", "SCORE", "BOX"], CHARACTERS=characters, BOX=boxes)


async def ask(model, outputs, **inputs):
    """Its outputs as arrays. raises TritonModelException with what it says where it fails"""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    asking = pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=tensors)
    response = await asking.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"{model}: {response.error().message()}")
    return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in outputs]
