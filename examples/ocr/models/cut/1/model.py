"""From the map of where text is to boxes, and from boxes to lines of one height."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

IS_TEXT = 0.3  # a pixel of the map that is at least so sure belongs to a line
LEAST_SCORE = 0.5  # of a box: the mean of the map in it
LEAST_SIDE = 3  # of a box, in pixels of the map
GROWTH = 1.6  # the detector finds the middle of a line; its edge is so many areas per circumference away
SAME_LINE = 10  # boxes whose tops differ by less stand side by side
HEIGHT, CLASSIFIER_WIDTH, LEAST_WIDTH = 48, 192, 320  # of lines


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    page = pb_utils.get_input_tensor_by_name(request, "PAGE").as_numpy()
    found = pb_utils.get_input_tensor_by_name(request, "FOUND").as_numpy()[0, 0]
    boxes = in_reading_order(boxes_of(found, page.shape[1], page.shape[0]))
    lines = [cut_out(page, box) for box in boxes]
    if not lines:
        boxes, lines = [np.zeros((4, 2), np.float32)], [np.full((HEIGHT, HEIGHT, 3), 255, np.uint8)]
    widths = [int(np.ceil(HEIGHT * line.shape[1] / line.shape[0])) for line in lines]
    line = np.zeros((len(lines), HEIGHT, max(LEAST_WIDTH, *widths), 3), np.uint8)
    upright = np.zeros((len(lines), HEIGHT, CLASSIFIER_WIDTH, 3), np.float32)
    for i, width in enumerate(widths):
        line[i, :, :width] = cv2.resize(lines[i], (width, HEIGHT))
        seen = min(width, CLASSIFIER_WIDTH)
        upright[i, :, :seen] = cv2.resize(lines[i], (seen, HEIGHT)) / 127.5 - 1
    made = {"BOX": np.stack(boxes), "UPRIGHT": upright.transpose(0, 3, 1, 2), "LINE": line,
            "WIDTH": np.array(widths, np.int32)}  # fmt: skip
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()])


def boxes_of(found, page_width, page_height):
    """Corners of each line of text on the page, (4, 2), clockwise from the left one that is higher."""
    mask = cv2.dilate((found > IS_TEXT).astype(np.uint8), np.ones((2, 2), np.uint8))
    outlines, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    to_page = np.array([page_width / found.shape[1], page_height / found.shape[0]])
    last = np.array([page_width - 1, page_height - 1])
    boxes = []
    for outline in outlines:
        middle, (w, h), angle = cv2.minAreaRect(outline)
        if min(w, h) < LEAST_SIDE or score(found, cv2.boxPoints((middle, (w, h), angle))) < LEAST_SCORE:
            continue
        grown = 2 * GROWTH * w * h / (2 * (w + h))
        corners = cv2.boxPoints((middle, (w + grown, h + grown), angle))
        box = clockwise(np.clip(np.round(corners * to_page), 0, last)).astype(np.float32)
        if min(np.linalg.norm(box[0] - box[1]), np.linalg.norm(box[0] - box[3])) > LEAST_SIDE:
            boxes.append(box)
    return boxes


def score(found, corners):
    """How sure the map is of what these corners enclose."""
    inside = np.zeros(found.shape, np.uint8)
    cv2.fillPoly(inside, [corners.astype(np.int32)], 1)
    return cv2.mean(found, inside)[0]


def clockwise(corners):
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1], kind="stable")] for pair in (by_x[:2], by_x[2:]))
    return np.stack([left[0], right[0], right[1], left[1]])


def in_reading_order(boxes):
    """By their tops, and those side by side from left to right."""
    lines = []
    for box in sorted(boxes, key=lambda box: box[0, 1]):
        if lines and box[0, 1] - lines[-1][0][0, 1] < SAME_LINE:
            lines[-1].append(box)
        else:
            lines.append([box])
    return [box for line in lines for box in sorted(line, key=lambda box: box[0, 0])]


def cut_out(page, box):
    """What the box has in it, upright; a tall one is turned by a quarter."""
    width = max(1, int(max(np.linalg.norm(box[0] - box[1]), np.linalg.norm(box[2] - box[3]))))
    height = max(1, int(max(np.linalg.norm(box[0] - box[3]), np.linalg.norm(box[1] - box[2]))))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    across = cv2.getPerspectiveTransform(box, target)
    line = cv2.warpPerspective(page, across, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    return np.rot90(line) if height >= 1.5 * width else line
