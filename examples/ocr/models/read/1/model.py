"""From the most likely character of each place to a line's text, as connectionist temporal classification has it."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

LEAST_SCORE = 0.5


class TritonPythonModel:
    def initialize(self, args):
        file = Path(__file__).with_name("characters.txt")  # a character a line, as `put_models.py` puts it
        self.characters = ["", *file.read_text(encoding="utf-8").rstrip("\n").split("\n"), " "]  # 0 is "none"

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        sureness = pb_utils.get_input_tensor_by_name(request, "CHARACTERS").as_numpy()
        boxes = pb_utils.get_input_tensor_by_name(request, "BOX").as_numpy()
        read = [self._read(line) for line in sureness]
        kept = [i for i, (_, score) in enumerate(read) if score >= LEAST_SCORE]
        texts, scores = np.empty(len(kept), object), np.array([read[i][1] for i in kept], np.float32)
        texts[:] = [read[i][0].encode() for i in kept]
        made = {"TEXT": texts, "SCORE": scores, "BOX": boxes[kept]}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made.items()])

    def _read(self, sureness):
        """sureness: (places, characters). The text, and the mean of how sure its characters are"""
        best = sureness.argmax(axis=1)
        begins = np.concatenate([[True], best[1:] != best[:-1]]) & (best > 0)  # what repeats is one character
        if not begins.any():
            return "", 0.0
        return "".join(self.characters[c] for c in best[begins]), float(sureness.max(axis=1)[begins].mean())
