"""One server of many small models for all the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.model_repository.config.test_repository_reader import write
from tests.support.kserve import KINDS
from tests.support.kserve_grpc import Client, connected
from tests.support.repository import ADD_SUB, REPEAT, identity, in_process, write_models
from tests.support.server import Threaded

LIMIT = 20_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    root = tmp_path_factory.mktemp("models")
    same = {f"same_{kind}": identity(kind, more="max_batch_size: 4") for kind in KINDS}
    models = {
        **same,
        "simple": ADD_SUB,
        "repeat_int32": REPEAT,
        "strings": identity("STRING", "-1, -1"),
        "one": identity("STRING", "1"),
        "three": identity("STRING", "3"),
        "label": identity("FP32", "4", "max_batch_size: 2").replace(
            'name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'
        ),
        "optional": ADD_SUB.replace('"add_sub"', '"identity"').replace(
            "dims: [ 16 ] },", "dims: [ 16 ] optional: true },", 1
        ),
        "many": identity("FP16", "-1, -1"),
        "reshaped": identity("FP32", "1", "max_batch_size: 2", "reshape { shape: [ ] }"),
        "loose": identity("FP32", "-1", "max_batch_size: 0"),
    }
    write(write_models(root, models), {"label/labels.txt": "a\nb\n\nd\n"})
    with in_process(root, http_max_input_size=LIMIT, grpc_port=0) as found:
        yield found


@pytest.fixture(scope="module")
def url(served: Threaded) -> str:
    return served.url


@pytest.fixture(scope="module")
def client(served: Threaded) -> Iterator[Client]:
    """Over gRPC."""
    with connected(served.grpc_url) as found:
        yield found
