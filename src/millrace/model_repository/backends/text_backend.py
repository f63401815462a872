"""Base of the language model and encoder instances: texts as tensors, and errors of the engine."""

from collections.abc import Callable, Sequence

from millrace.errors import BusyError, MachineError, RequestError
from millrace.model_repository.backends.backend import Instance
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.runtime.engine_thread import EngineThread


class EngineInstance(Instance):
    """An instance backed by an engine; it is reported lost when its engine loop has died."""

    responds_async = True
    _report_lost: Callable[[str], None] | None = None

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def on_lost(self, tell: Callable[[str], None]) -> None:
        self._report_lost = tell
        self._report_dead_engine()  # it may have died during warm-up

    def _report_dead_engine(self) -> None:
        """Report a dead engine; called by the loop's thread after its callbacks."""
        tell = self._report_lost
        if self._thread.dead_because and tell is not None:
            self._report_lost = None
            tell(f"the engine has stopped: {self._thread.dead_because}")


def begin_each(requests: Sequence[InferRequest], begin: Callable[[InferRequest], None]) -> None:
    """Begin each request. A StatusError, RequestError, BusyError or MachineError of `begin` fails only that request."""
    for request in requests:
        try:
            begin(request)
        except StatusError as error:
            request.fail(error)
        except RequestError as error:
            request.fail(invalid(f"{request.error_prefix}{error.what}; expected: {error.expected}"))
        except (BusyError, MachineError) as error:
            request.fail(StatusError(Code.UNAVAILABLE, f"{request.error_prefix}{error.what}"))


def input_texts(request: InferRequest, name: str) -> list[str]:
    """Return the texts of an input; empty if the request lacks it. raises StatusError"""
    array = request.inputs.get(name)
    try:
        return [] if array is None else [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"{request.error_prefix}{name} holds bytes that are no UTF-8: {error}") from None
