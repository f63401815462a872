"""Models whose event loop asks decoupled models: one that waits for a response does not hold up the others."""

import asyncio
from pathlib import Path

from tests.support.python_models import ANY, HEAD, SAY, asked, loaded, text, write

DECOUPLED = " model_transaction_policy { decoupled: true } "
GATE = """
    async def execute(self, requests):
        for request in requests:
            asyncio.get_running_loop().create_task(self.answer(request, request.get_response_sender()))

    async def answer(self, request, sender):
        self.waiting = getattr(self, "waiting", 0) + 1
        while self.waiting < 3:
            await asyncio.sleep(0.005)
        sender.send(said("through"))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ASKS = """
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            inner = pb_utils.InferenceRequest(
                model_name="gate", inputs=request.inputs(), requested_output_names=["OUT"]
            )
            for response in await inner.async_exec(decoupled=True):
                if response.output_tensors():
                    sender.send(said(response.output_tensors()[0].as_numpy()[0].decode()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_plain_loop_over_responses_holds_up_nobody(tmp_path: Path) -> None:
    write(tmp_path, "gate", "import asyncio\n" + HEAD + GATE + SAY, ANY % DECOUPLED)
    write(tmp_path, "asks", "import asyncio\n" + HEAD + ASKS + SAY, ANY % DECOUPLED)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("gate", "asks"):
                await repository.load(name)
            model, told, ended = repository.get("asks"), list[bytes](), asyncio.Semaphore(0)

            def answered(response: object, error: object, final: bool) -> None:
                assert error is None, error
                if response is not None:
                    told.extend(response.outputs["OUT"].tolist())  # type: ignore[attr-defined]
                if final:
                    ended.release()

            for _ in range(3):  # the gate opens once all three wait there
                model.submit(asked(model, IN=text("x")), answered)
            for _ in range(3):
                await asyncio.wait_for(ended.acquire(), 20)
            assert told == [b"through"] * 3

    asyncio.run(run())
