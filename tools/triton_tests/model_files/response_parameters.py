"""Sets the parameters that RESPONSE_PARAMETERS has as JSON; decoupled, it has a list of them, one a response."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def text(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0].decode()


def answer(said, parameters):
    array = np.array([[said]], dtype=np.object_)
    try:
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)], parameters=parameters)
    except Exception as error:  # noqa: BLE001 (what it raises is what is asked for)
        refused = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=refused)


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                sender = request.get_response_sender()
                for one in json.loads(text(request, "RESPONSE_PARAMETERS")):
                    sender.send(answer(json.dumps(one), one))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return None
        return [self.single(text(request, "RESPONSE_PARAMETERS")) for request in requests]

    def single(self, said):
        parameters = json.loads(said)
        if isinstance(parameters, dict) and "1" in parameters:  # JSON has no keys that are numbers
            parameters = {1: parameters["1"]}
        return answer(said, parameters)
