"""Asks the decoupled model `async_execute_decouple` for each element of WAIT_SECONDS, all at the same time."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            seconds = pb_utils.get_input_tensor_by_name(request, "WAIT_SECONDS").as_numpy()
            await asyncio.gather(*(self.ask(one) for one in seconds))
            output = pb_utils.Tensor("DUMMY_OUT", seconds.astype(np.float32))
            sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def ask(self, seconds):
        asked = pb_utils.InferenceRequest(
            model_name="async_execute_decouple",
            inputs=[pb_utils.Tensor("WAIT_SECONDS", seconds.reshape(1, 1))],
            requested_output_names=["DUMMY_OUT"],
        )
        for answer in await asked.async_exec(decoupled=True):
            if answer.has_error():
                raise RuntimeError(answer.error().message())
