"""Sleeps EXECUTE_DELAY seconds, one after the other, and logs whether its request is cancelled."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        if not self.decoupled:
            return [self.answer(request, self.delay_s(request)) for request in requests]
        for request in requests:
            sender, delay_s = request.get_response_sender(), self.delay_s(request)
            threading.Thread(target=self.later, args=(sender, delay_s), daemon=True).start()
        return None

    def delay_s(self, request):
        return float(pb_utils.get_input_tensor_by_name(request, "EXECUTE_DELAY").as_numpy().flatten()[0])

    def later(self, sender, delay_s):
        time.sleep(2)  # by then the request is let go of
        sender.send(self.answer(sender, delay_s), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, cancellable, delay_s):
        waited_s = 0.0
        while waited_s < delay_s:
            if cancellable.is_cancelled():
                pb_utils.Logger.log_info(f"[execute_cancel] Request cancelled at {waited_s} s")
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                )
            pb_utils.Logger.log_info(f"[execute_cancel] Request not cancelled at {waited_s} s")
            time.sleep(1)
            waited_s += 1.0
        done = np.array(["not cancelled"], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", done.reshape(1, 1))])
