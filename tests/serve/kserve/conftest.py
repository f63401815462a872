"""One server of many small models for all the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.serve.repository.test_folders import write
from tests.support.kserve import KINDS
from tests.support.repository import ADD_SUB, REPEAT, identity, serving, write_models

LIMIT = 20_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    same = {f"same_{kind}": identity(kind, more="max_batch_size: 4") for kind in KINDS}
    models = {
        **same,
        "simple": ADD_SUB,
        "repeat_int32": REPEAT,
        "strings": identity("STRING", "-1, -1"),
        "one": identity("STRING", "1"),
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
    with serving(root, http_max_input_size=LIMIT) as found:
        yield found
