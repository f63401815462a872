"""Asks the model `identity_fp32` from a thread and sends its answer."""

import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.ask, args=(request.get_response_sender(), array), daemon=True).start()

    def ask(self, sender, array):
        asked = pb_utils.InferenceRequest(
            model_name="identity_fp32", inputs=[pb_utils.Tensor("INPUT0", array)], requested_output_names=["OUTPUT0"]
        )
        answer = asked.exec()
        output = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", output)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
