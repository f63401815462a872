"""Waits as long as each element of WAIT_SECONDS says, all at the same time, then answers."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request, request.get_response_sender()) for request in requests))

    async def answer(self, request, sender):
        seconds = pb_utils.get_input_tensor_by_name(request, "WAIT_SECONDS").as_numpy()
        await asyncio.gather(*(self.wait(float(one[0])) for one in seconds))
        output = pb_utils.Tensor("DUMMY_OUT", seconds)
        sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def wait(self, wait_secs):
        if wait_secs < 0:
            raise ValueError("wait_secs cannot be negative")
        await asyncio.sleep(wait_secs)
