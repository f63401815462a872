"""Sends and returns as many responses as its inputs say, before its `execute` returns and after."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def asked(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def response(index, rows):
    return pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", np.full((rows, 1), index, np.uint16))])


def send(sender, count, final, first, rows):
    for i in range(count):
        sender.send(response(first + i, rows))
    if final:
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class TritonPythonModel:
    def execute(self, requests):
        before, returned, after = [], [], []
        for index, request in enumerate(requests):
            rows = asked(request, "RETURN_A_RESPONSE").shape[0]
            early = int(asked(request, "NUMBER_OF_RESPONSE_BEFORE_RETURN").sum())
            late = int(asked(request, "NUMBER_OF_RESPONSE_AFTER_RETURN").sum())
            early_end = bool(asked(request, "SEND_COMPLETE_FINAL_FLAG_BEFORE_RETURN").any())
            late_end = bool(asked(request, "SEND_COMPLETE_FINAL_FLAG_AFTER_RETURN").any())
            sender = request.get_response_sender() if early or late or early_end or late_end else None
            before.append((sender, early, early_end, 1000, rows))
            after.append((sender, late, late_end, 2000, rows))
            wanted = bool(asked(request, "RETURN_A_RESPONSE").any())
            returned.append(response(index, rows) if wanted else None)
        for one in before:
            send(*one)
        self.later(after)
        return returned if any(one is not None for one in returned) else None

    def later(self, after):
        def run():
            time.sleep(0.5)
            for one in after:
                if one[0] is not None:
                    send(*one)

        threading.Thread(target=run, daemon=True).start()
