"""A model.py that writes into the socket of its process: whoever waits for it is answered."""

import asyncio
import re
from pathlib import Path

import pytest

from millrace.model_repository.python_backend.stub import ipc
from millrace.model_repository.python_backend.stub.ipc import _HEAD, _MARK
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, text, write

CODE = HEAD + """
    def execute(self, requests):
        import os, sys
        if os.path.exists({mark!r}):
            return [said("well")]
        open({mark!r}, "w").close()
        os.write(int(sys.argv[1]), {data!r})
        {then}
""" + SAY  # fmt: skip
WAIT = "threading.Event().wait()"
WRITTEN = {
    "text": (b"hello, I am a log line\n", WAIT),
    "one byte": (b"x", WAIT),
    "text, and an answer": (b"printed\n", "return [said('late')]"),
    "zeros": (bytes(64), WAIT),
    "a huge length": (_HEAD.pack(_MARK, 2**32 - 1, 5), WAIT),
    "a head beyond the message": (_HEAD.pack(_MARK, 5, 6), WAIT),
    "no JSON": (_HEAD.pack(_MARK, 3, 3) + b"[1,", WAIT),
    "another JSON": (_HEAD.pack(_MARK, 2, 2) + b"[]", WAIT),
    "an unknown kind": (_HEAD.pack(_MARK, 37, 37) + b'{"t":"no","tensors":[],"segments":[]}', WAIT),
    "deep JSON": (_HEAD.pack(_MARK, 200_000, 200_000) + b"[" * 200_000, WAIT),
    "half a message": (_HEAD.pack(_MARK, 1000, 10) + b"{", WAIT),
    "half a head": (_MARK + b"\0", WAIT),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_garbage_in_the_socket_ends_the_process_and_answers_the_request(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "FRAME_TIMEOUT_S", 0.3)
    data, then = WRITTEN[what]
    write(tmp_path, "m", CODE.format(mark=str(tmp_path / "mark"), data=data, then=then), ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            with pytest.raises(StatusError, match=re.escape("Stub process 'm_0' is not healthy")):
                await asyncio.wait_for(model.infer(asked(model, IN=text("x"))), 20)
            again = await asyncio.wait_for(model.infer(asked(model, IN=text("x"))), 20)  # of a new process
            assert again.outputs["OUT"].tolist() == [b"well"]

    asyncio.run(run())
