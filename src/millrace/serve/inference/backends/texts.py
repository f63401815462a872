"""What language models and encoders of ours share in a repository: texts as tensors, and errors of the engine."""

from collections.abc import Callable, Sequence

from millrace.errors import BusyError, RequestError
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.status import Code, StatusError, invalid


def begin_each(requests: Sequence[InferRequest], begin: Callable[[InferRequest], None]) -> None:
    """begin: raises StatusError, RequestError, BusyError, which is the answer of its request alone"""
    for request in requests:
        try:
            begin(request)
        except StatusError as error:
            request.fail(error)
        except RequestError as error:
            request.fail(invalid(f"{request.named}{error.what}; expected: {error.expected}"))
        except BusyError as error:
            request.fail(StatusError(Code.UNAVAILABLE, f"{request.named}{error.what}"))


def texts_of(request: InferRequest, name: str) -> list[str]:
    """Of its input; none where it has none of that name. raises StatusError"""
    array = request.inputs.get(name)
    try:
        return [] if array is None else [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"{request.named}{name} holds bytes that are no UTF-8: {error}") from None
