"""What model.py files do that goes wrong: each ends its own request, or its own load."""

import asyncio
import gc
import tracemalloc
from pathlib import Path

import pytest

from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.python_backend.python_process import StubInstance
from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import objects
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write

DECOUPLED = ANY % "model_transaction_policy { decoupled: true }"
WRONG = [
    ("raise ValueError('of the model')", "ValueError: of the model; at model.py(9): execute"),
    (
        "return []",
        "Number of InferenceResponse objects do not match the number of InferenceRequest "
        "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
    ),
    ("return None", "Expected a list in the execute return, found type 'NoneType'."),
    (
        "return [3]",
        "Expected an 'InferenceResponse' object in the execute function return list, found type 'int'.",
    ),
    (
        "return [None]",
        "Expected an 'InferenceResponse' object in the execute function return list, found type 'NoneType'.",
    ),
    (
        "return [pb_utils.Tensor('x', np.zeros(1, np.complex64))]",
        "TritonModelException: the data type complex64 of tensor 'x' has no name in Triton; at model.py(9): execute",
    ),
]


def test_a_decoupled_model_returns_nothing(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + "    def execute(self, requests):\n        return []\n", DECOUPLED)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await one(repository, "m", text("x"))
            what = "is using the decoupled mode and the execute function must return None."
            assert str(failed.value) == f"Python model 'm_0' {what}"

    asyncio.run(run())


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_what_goes_wrong_in_a_model_is_the_answer(tmp_path: Path, body: str, says: str) -> None:
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for _ in range(2):  # and it goes on
                with pytest.raises(StatusError) as failed:
                    await one(repository, "m", text("x"))
                assert failed.value.code is Code.INTERNAL
                instance = "Failed to process the request(s) for model instance 'm_0', message: "
                assert str(failed.value).startswith(instance + says)

    asyncio.run(run())


def test_the_line_is_told_of_a_repository_without_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("models"), "m", HEAD + "    def execute(self, requests):\n        return [1 / 0]\n", ANY % "")

    async def run() -> None:
        async with loaded(Path("models")) as repository:
            with pytest.raises(StatusError, match=r"ZeroDivisionError: division by zero; at model.py\(9\): execute"):
                await one(repository, "m", text("x"))

    asyncio.run(run())


def test_errors_that_a_model_returns_keep_their_code(tmp_path: Path) -> None:
    body = (
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('not now', pb_utils.TritonError.UNAVAILABLE))]"
    )
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await one(repository, "m", text("x"))
            assert (failed.value.code, str(failed.value)) == (Code.UNAVAILABLE, "not now")

    asyncio.run(run())


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    cases = {
        "syntax": ("def", "SyntaxError"),
        "class": ("x = 1", "model.py has no class TritonPythonModel"),
        "init": (HEAD + "    def initialize(self, args):\n        raise pb_utils.TritonModelException('no disk')\n",
                 "TritonModelException: no disk; at model.py(9): initialize"),
        "package": ("import nowhere_to_be", "ModuleNotFoundError: No module named 'nowhere_to_be'; at model.py(1): "
                    "<module>; install its package into the environment that runs the model: that of millrace serve, "
                    "or the one that EXECUTION_ENV_PATH in config.pbtxt names"),
        "none": (HEAD + "    pass\n", "TritonPythonModel of model 'none' has no function execute"),
    }  # fmt: skip
    for name, (code, _) in cases.items():
        write(tmp_path, name, code, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name, (_, says) in cases.items():
                with pytest.raises(StatusError) as failed:
                    await repository.load(name)
                told = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: Internal: {says}"
                assert str(failed.value).startswith(told)

    asyncio.run(run())


def resident_bytes(model: Model) -> int:
    """Of the process that it has for itself; 0 where it has none."""
    assert isinstance(model, BackendModel)
    instance = model._workers[0]._instance
    if not isinstance(instance, StubInstance):
        return 0
    assert instance._process.frames.arena.used_bytes <= 1 << 20, "inputs of a few requests, at most"
    return int(Path(f"/proc/{instance._process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["", OWN], ids=["here", "own"])
def test_a_model_that_raises_ten_thousand_times_leaves_memory_flat(tmp_path: Path, where: str) -> None:
    """server#7481: there shared memory grows with every exception."""
    code = HEAD + "    def execute(self, requests):\n        raise ValueError('x' * 1000)\n"
    write(tmp_path, "m", code, ANY % where)

    async def run() -> list[int]:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, traced, resident = repository.get("m"), list[int](), 0
            for i in range(10_001):
                if i == 1000:
                    tracemalloc.start()
                    resident = resident_bytes(model)
                if i in (1000, 5500, 10_000):
                    gc.collect()
                    traced.append(tracemalloc.get_traced_memory()[0])
                with pytest.raises(StatusError):
                    await model.infer(asked(model, IN=objects([b"y" * (20_000 if where else 1000)])))
            assert resident_bytes(model) - resident < 2_000_000, "of 180 MB"
            return traced

    try:
        begin, middle, end = asyncio.run(run())
    finally:
        tracemalloc.stop()
    # A leak grows in both halves; the interpreter's table of interned strings, of megabytes, doubles in one of them.
    assert min(middle - begin, end - middle) < 100_000, "4,500 requests, each of more than 2,000 bytes"


SILENT = "class Silent(Exception):\n    def __str__(self):\n        raise Silent\n"


@pytest.mark.parametrize("what", ["raise SystemExit(3)", "raise Silent", "raise KeyboardInterrupt"])
def test_a_model_that_ends_the_process_ends_only_its_batch(tmp_path: Path, what: str) -> None:
    name = what.removeprefix("raise ").partition("(")[0]
    code = HEAD + (
        f"    def execute(self, requests):\n        if requests[0].request_id() == 'end': {what}\n"
        "        return [said('fine') for _ in requests]\n"
        f"    def finalize(self):\n        {what}\n"
    )
    write(tmp_path, "m", code + SAY + SILENT, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            wrong = asked(model, IN=text("a"))
            wrong.id = "end"
            with pytest.raises(StatusError, match=name):
                await asyncio.wait_for(model.infer(wrong), 5)
            answer = await asyncio.wait_for(model.infer(asked(model, IN=text("a"))), 5)
            assert answer.outputs["OUT"].tolist() == [b"fine"]
            await asyncio.wait_for(model.retire(), 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(2)\n",
        HEAD + "    @staticmethod\n    def auto_complete_config(config):\n        raise SystemExit\n",
        HEAD + "    @staticmethod\n    def auto_complete_config(config):\n        config.as_dict().clear()\n"
        "        return config\n",
    ],
)
def test_a_model_that_ends_the_process_while_it_loads_is_only_not_loaded(tmp_path: Path, code: str) -> None:
    write(tmp_path, "m", code, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match="load failed for model 'm'"):
                await repository.load("m")

    asyncio.run(run())


def test_a_load_goes_on_when_its_client_goes_away(tmp_path: Path) -> None:
    """Cut off in the middle, it would leave an instance that nobody can close."""
    code = HEAD + (
        "    def initialize(self, args):\n        import time\n        time.sleep(0.3)\n"
        "    def execute(self, requests):\n        return [said('fine') for _ in requests]\n"
    )
    write(tmp_path, "m", code + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(repository.load("m"), 0.1)
            await asyncio.wait_for(repository.unload("m"), 5)  # after the change that is under way
            assert (await repository.index(False))[0]["version"] == "1", "it was loaded"

    asyncio.run(run())


SENDER = "the model let go of its response sender without TRITONSERVER_RESPONSE_COMPLETE_FINAL"
LOST = [
    ("requests[0].get_response_sender().send(said('once'))", SENDER, 1),
    ("requests[0].get_response_sender()", SENDER, 0),
    # As models of older releases end it; here, as in Triton today, there is nothing of that name.
    ("sender = requests[0].get_response_sender()\n        getattr(sender, 'close', int)()", SENDER, 0),
    ("threading.Thread(target=lambda sender: sender.send(said('once')), args=[requests[0].get_response_sender()]"
     ").start()", SENDER, 1),
    ("pass", "the model let go of a request without TRITONSERVER_RESPONSE_COMPLETE_FINAL", 0),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says", "n"), LOST)
def test_a_sender_that_is_lost_ends_its_request(tmp_path: Path, body: str, says: str, n: int) -> None:
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n" + SAY, DECOUPLED)

    async def run() -> list[tuple[bool, str, bool]]:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, found, done = repository.get("m"), list[tuple[bool, str, bool]](), asyncio.Event()

            def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
                found.append((response is not None, str(error or ""), final))
                if final:
                    done.set()

            model.submit(asked(model, IN=text("x")), receive)
            await asyncio.wait_for(done.wait(), 5)
            return found

    *before, last = asyncio.run(run())
    assert before == [(True, "", False)] * n
    assert last == (False, f"{says}, so that nobody can answer any more", True)


def test_a_sender_that_is_kept_may_answer_later(tmp_path: Path) -> None:
    code = (
        "    def execute(self, requests):\n"
        "        sender = requests[0].get_response_sender()\n"
        "        threading.Timer(0.05, lambda: sender.send(said('late'), 1)).start()\n"
    )
    write(tmp_path, "m", HEAD + code + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await asyncio.wait_for(one(repository, "m", text("x")), 5)).tolist() == [b"late"]

    asyncio.run(run())


PARAMETERS = [
    ("'[1]'", "the parameters of a response are a list, not an object"),
    ("'{'", "the parameters of a response are no JSON object: Expecting property name"),
    ("{'a': object()}", "the parameters of a response are no JSON object: Object of type object is not"),
    ("[]", "Expect parameters to have type dict, got <class 'list'>"),
    ("{1: 'x'}", "Expect parameters keys to have type str, found type <class 'int'>"),
    (
        "{'a': [1]}",
        "Expect parameters values to have type bool/int/str, found type <class 'list'> for parameter 'a' of",
    ),
    ("{'a': 0.5}", "Expect parameters values to have type bool/int/str, found type <class 'float'> for parameter 'a'"),
    ("{'a': None}", "Expect parameters values to have type bool/int/str, found type <class 'NoneType'>"),
    ("{'a': 2**64}", "parameter 'a' of a response is no integer of 64 bits"),
    ("{'a': chr(0xd800)}", "parameter 'a' of a response is no text: 'utf-8' codec can't encode"),
    ("{chr(0xd800): 1}", r"parameter '\ud800' of a response is no text"),
    ("{'a': 'x' * 70000}", "the parameters of a response have 70009 characters; at most 65536 are allowed"),
]


@pytest.mark.parametrize(("parameters", "says"), PARAMETERS)
def test_parameters_of_responses_that_no_client_can_read(tmp_path: Path, parameters: str, says: str) -> None:
    body = f"return [pb_utils.InferenceResponse([], parameters={parameters})]"
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await one(repository, "m", text("x"))
            assert f"message: TritonModelException: {says}" in str(failed.value)

    asyncio.run(run())
