"""What is mutated of tensor models is right before: otherwise nothing behind the first check would be reached."""

from pathlib import Path
from random import Random

import pytest

from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from tests.fuzz.tensor_models import CONFIGS, MODELS, Front, over_grpc, over_http
from tests.support.repository import identity, write_models


@pytest.mark.parametrize("i", range(len(CONFIGS)))
def test_good_configurations_are_taken(tmp_path: Path, i: int) -> None:
    write_models(tmp_path, {"m": CONFIGS[i], "n": identity("INT32", "4", "max_batch_size: 8")})
    for model in read_repositories([tmp_path])[0].models:
        assert model.is_servable, [p.what for p in model.problems]


def test_good_requests_are_answered(tmp_path: Path) -> None:
    front, rng, seen = Front(tmp_path), Random(0), set[str]()
    for _ in range(100):
        path, headers, body = over_http(rng, mutated=False)
        status, parts = front.ask(path, headers, body)
        assert status == 200 and parts and all(b"model_name" in part for part in parts), (path, body, parts)
        told = message("ModelInferResponse").FromString(front.call(over_grpc(rng, mutated=False)))
        assert told.outputs and told.model_name in MODELS
        seen |= {path, told.model_name}
    assert len(seen) > 2 * len(MODELS)
