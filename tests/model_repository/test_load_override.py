"""Loads with files of the client's, and loads that only say what they would change."""

import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository.repository import multi_repository
from millrace.settings import read_bounded
from tests.support.ensembles import ensemble
from tests.support.kserve_grpc import connected, refusal
from tests.support.python_models import HEAD, write
from tests.support.repository import ADD_SUB, identity, in_process, serving, write_models

BATCHES = identity("FP32", "1", "max_batch_size: 8")
CONFIG: dict[str, Any] = {
    "backend": "identity",
    "max_batch_size": 2,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4], "label_filename": "labels.txt"}],
}


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files that clients bring are."""
    folder = tmp_path / "brought"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_models(tmp_path / "models", {"m": BATCHES})


def load(url: str, model: str, **parameters: Any) -> tuple[int, Any]:
    reply = httpx.post(f"{url}/v2/repository/models/{model}/load", json={"parameters": parameters}, timeout=30)
    return reply.status_code, reply.json() if reply.content else None


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)).partition("/")[2] for path in folder.rglob("*") if path.is_file())


def classes(url: str, model: str, version: int) -> Any:
    body = {
        "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [0, 1, 0, 0]}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}],
    }
    reply = httpx.post(f"{url}/v2/models/{model}/versions/{version}/infer", json=body)
    return reply.json()["outputs"][0]["data"]


def test_files_stand_in_place_of_the_models_folder(root: Path, brought: Path) -> None:
    said = {"config": json.dumps(CONFIG), "file:3/model.bin": encoded("x"), "file:labels.txt": encoded("a\nb\nc\nd")}
    with in_process(root, model_control_mode="explicit", load_model=("*",), grpc_port=0) as served:
        for model in ("m", "new"):
            assert load(served.url, model, **said) == (200, None)
            assert classes(served.url, model, 3) == ["1.000000:1:b"]
            assert httpx.get(f"{served.url}/v2/models/{model}").json()["versions"] == ["3"]
        assert files(brought) == ["m/3/model.bin", "m/labels.txt", "new/3/model.bin", "new/labels.txt"]
        assert load(served.url, "m") == (200, None), "the repository's again"
        assert httpx.get(f"{served.url}/v2/models/m").json()["versions"] == ["1"]
        with connected(served.grpc_url) as client:
            given = {
                "config": {"string_param": json.dumps(CONFIG)},
                "file:2/x": {"bytes_param": b"\xff"},
                "file:labels.txt": {"bytes_param": b"p\nq"},
            }
            client.call("RepositoryModelLoad", model_name="new", parameters=given)
            assert classes(served.url, "new", 2) == ["1.000000:1:q"]
            wrong = {"config": given["config"], "file:2/x": {"string_param": "/w=="}}
            what = "invalid value type for load parameter 'file:2/x', expected bytes_param."
            asked = lambda: client.call("RepositoryModelLoad", model_name="new", parameters=wrong)  # noqa: E731
            assert refusal(asked) == ("INVALID_ARGUMENT", what)
            client.call("RepositoryModelUnload", model_name="new")
        until_s = time.monotonic() + 5
        while list(brought.iterdir()) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert list(brought.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize(
    "parameters, status, says",
    [
        ({"file:1/x": "eA=="}, 400, "failed to load 'm', override files are given without the parameter 'config'"),
        ({"config": "{}", "file:../x": ""}, 400, "'file:../x' is no path below a model's folder"),
        ({"config": "{}", "file:/etc/x": ""}, 400, "'file:/etc/x' is no path below a model's folder"),
        ({"config": "{}", "file:1/./x": ""}, 400, "'file:1/./x' is no path below a model's folder"),
        ({"config": "{}", "file:": ""}, 400, "'file:' is no path below a model's folder"),
        ({"config": "{}", "file:1/x": "?"}, 400, "'file:1/x' is not base64"),
        ({"config": "{}", "file:1/x": 1}, 500, "attempt to access JSON non-string as string"),
        ({"config": "{}", "file:config.pbtxt": ""}, 400, "'file:config.pbtxt' is not taken"),
        ({"config": json.dumps(CONFIG), "file:x": ""}, 500, "failed to load 'm', failed to poll from model repository"),
        ({"config": json.dumps({**CONFIG, "backend": "python"}), "file:1/model.py": "", "file:labels.txt": ""}, 501,
         "files of a load are not taken for backend 'python', which would run them as programs"),
        ({"config": "{}", "file:1/x": "", "dry_run": True}, 501, "a dry run takes no files"),
        ({"cfg": "{}"}, 400, "unrecognized load parameter 'cfg'"),
        ({"config": "{}}"}, 400, "failed to load 'm', its config: failed to parse the request JSON buffer: "),
        ({"config": "[]"}, 500, "failed to load 'm', its config: attempt to access JSON non-object as object"),
    ],
)  # fmt: skip
def test_files_that_are_not_taken(root: Path, brought: Path, parameters: Any, status: int, says: str) -> None:
    with serving(root, model_control_mode="explicit", load_model=("*",)) as url:
        found, reply = load(url, "m", **parameters)
        assert found == status and reply["error"].startswith(says), reply
        assert httpx.get(f"{url}/v2/models/m/ready").status_code == 200, "what is served stays"
    assert list(brought.iterdir()) == []


def test_a_dry_run_says_what_would_change(root: Path) -> None:
    write_models(root, {"of": ADD_SUB})
    with serving(root) as url:

        def dry(model: str = "m", **more: Any) -> Any:
            status, reply = load(url, model, dry_run=True, **more)
            assert status == 200
            return reply

        nothing = {"name": "m", "would": "change nothing", "problems": [], "config": [], "files": [], "ensembles": [],
                   "versions": {"added": [], "removed": [], "loaded anew": ["1"]}}  # fmt: skip
        assert dry() == nothing
        told = httpx.get(f"{url}/v2/models/m/config").json()
        assert dry(config=json.dumps(told)) == nothing
        write_models(root, {"m": BATCHES.replace("max_batch_size: 8", "max_batch_size: 4")}, version=2)
        (root / "m" / "2" / "weights").write_text("x")
        found = dry()
        assert found["would"] == "reload"
        assert found["versions"] == {"added": ["2"], "removed": ["1"], "loaded anew": []}
        assert found["config"] == [{"field": "max_batch_size", "is": 8, "would be": 4}]
        assert found["files"] == ["2", "2/weights", "config.pbtxt"]
        said = {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 5}}
        group = told["instance_group"][0] | {"count": 3}
        changes = {
            one["field"]: (one["is"], one["would be"])
            for one in dry(config=json.dumps(told | said | {"instance_group": [group]}))["config"]
        }
        assert set(changes) == {"instance_group[0].count", "dynamic_batching"}
        assert changes["instance_group[0].count"] == (told["instance_group"][0]["count"], 3)
        before, after = changes["dynamic_batching"]
        assert before is None and after["max_queue_delay_microseconds"] == 5
        (root / "m" / "config.pbtxt").write_text("max_batchsize: 4")
        wrong = dry()
        assert wrong["would"] == "fail" and wrong["serves"] == ["1"]
        assert wrong["problems"][0]["where"].endswith("m/config.pbtxt:1:1")
        assert wrong["problems"][0]["what"] == '"max_batchsize" is no field of a configuration'
        write_models(root, {"another": BATCHES})
        assert dry("another") == {"name": "another", "would": "load", "problems": [], "ensembles": [],
                                  "versions": {"added": ["1"], "removed": [], "loaded anew": []}}  # fmt: skip
        assert dry("gone")["would"] == "fail"
        (root / "another" / "config.pbtxt").write_text(BATCHES.replace('backend: "identity"', '\n backend: "idendity"'))
        for where, wrong in (
            ("another/config.pbtxt:2:2", dry("another")),
            ("m/(given).pbtxt:1:1", dry(config=json.dumps({"backend": "idendity"}))),
        ):
            assert wrong["would"] == "fail" and [p["level"] for p in wrong["problems"]] == ["error"]
            (problem,) = wrong["problems"]
            assert problem["where"].endswith(where) and problem["what"] == "unable to find backend 'idendity'"
            assert problem["expected"] == 'did you mean "identity"?'
        assert load(url, "m", dry_run=1)[0] == 500
        index = httpx.post(f"{url}/v2/repository/index").json()
        assert {one["name"]: one.get("state") for one in index} == {"m": "READY", "of": "READY", "another": None}
        assert httpx.get(f"{url}/v2/models/m/config").json()["max_batch_size"] == 8, "nothing has changed"


def test_a_dry_run_of_an_ensemble_looks_at_its_steps(root: Path) -> None:
    def of(*steps: str) -> str:
        names = [f"x{i}" for i in range(len(steps) + 1)]
        links = zip(steps, names, names[1:], strict=False)
        said = [(step, {"INPUT0": a}, {"OUTPUT0": b}) for step, a, b in links]
        return ensemble(["x0"], [names[-1]], said, kind="FP32", dims="1")

    wrong = BATCHES.replace('"identity"', '"idendity"')
    write_models(root, {
        "good": BATCHES, "bad": wrong, "fine": of("good", "m"), "lost": of("m", "nix"), "broken": of("m", "inner"),
        "inner": of("bad"), "ring": of("ring"), "kept": of("m"),
    })  # fmt: skip
    with serving(root, model_control_mode="explicit", load_model=("m",)) as url:

        def dry(model: str) -> tuple[str, list[str]]:
            found = load(url, model, dry_run=True)[1]
            return found["would"], [p["what"] for p in found["problems"]]

        assert dry("fine") == ("load", [])
        assert dry("lost") == (
            "fail", ["ensemble lost contains models that are not available or ambiguous: nix"],
        )  # fmt: skip
        would, said_of = dry("broken")
        (said,) = (one for one in said_of if "cannot be loaded" in one)
        assert would == "fail" and said.startswith("ensemble 'broken' depends on 'bad', which cannot be loaded: ")
        assert said.endswith("bad/config.pbtxt:1:1: unable to find backend 'idendity'")
        would, (said,) = dry("ring")
        assert would == "fail" and said.startswith("circular dependency between ensembles")
        for model in ("fine", "lost", "broken", "ring"):
            would = dry(model)[0]
            assert (load(url, model)[0] == 200) == (would != "fail"), f"{model}: as a load does"
        (root / "m" / "config.pbtxt").write_text("what?")
        assert dry("kept")[0] == "load", "of what is served nothing is read"


def test_a_dry_run_finds_tensors_that_do_not_fit(root: Path) -> None:
    """Of an ensemble that would be loaded, and of those that have the model that would be."""
    links = [(step, {"INPUT0": a}, {"OUTPUT0": b}) for step, a, b in (("m", "x", "y"), ("half", "y", "z"))]
    write_models(root, {
        "half": BATCHES.replace("FP32", "FP16"), "e": ensemble(["x"], ["z"], links, kind="FP32", dims="1"),
        "kept": ensemble(["x"], ["y"], links[:1], kind="FP32", dims="1"),
    })  # fmt: skip
    with serving(root, model_control_mode="explicit", load_model=("kept",)) as url:
        found = load(url, "e", dry_run=True)[1]
        what = "in ensemble e, ensemble tensor y: inconsistent data type: TYPE_FP32 is inferred from model m while "
        what += "TYPE_FP16 is inferred from model half"
        assert found["would"] == "fail" and found["problems"][0]["what"] == what
        assert found["problems"][0]["where"].count(":") == 2, "with line and column"
        status, refused = load(url, "e")
        assert status == 500 and what in refused["error"]
        (root / "m" / "config.pbtxt").write_text(BATCHES.replace("FP32", "FP16"))
        found = load(url, "m", dry_run=True)[1]
        assert (found["would"], found["ensembles"]) == ("reload", ["e", "kept"])
        assert [p["level"] for p in found["problems"]] == ["warning"]
        what = "ensemble 'kept' would be unloaded: in ensemble kept, ensemble tensor x: inconsistent data type: "
        assert found["problems"][0]["what"].startswith(what)
        assert load(url, "m")[0] == 200
        served = {one["name"] for one in httpx.post(f"{url}/v2/repository/index", json={"ready": True}).json()}
        assert served == {"half", "m"}, "as it was told"


def test_a_dry_run_looks_once_into_a_model_of_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []

    def counted(path: Path, most: int) -> bytes:
        looked.append(path)
        return read_bounded(path, most)

    monkeypatch.setattr(multi_repository, "read_bounded", counted)
    config = BATCHES.replace("identity", "python")
    write(tmp_path, "m", HEAD + "    def execute(self, requests):\n        return []\n", config)
    links = [("m", {"INPUT0": f"t{i}"}, {"OUTPUT0": f"t{i + 1}"}) for i in range(4)]
    write_models(tmp_path, {"e": ensemble(["t0"], ["t4"], links, kind="FP32", dims="1")})
    with serving(tmp_path, model_control_mode="explicit", load_model=("e",)) as url:
        looked.clear()
        (tmp_path / "m" / "config.pbtxt").write_text(config.replace("FP32", "FP16"))
        (problem,) = load(url, "m", dry_run=True)[1]["problems"]
        assert problem["what"].startswith("ensemble 'e' would be unloaded: ")
        assert looked == [tmp_path / "m/1/model.py"]


def test_where_nothing_can_be_written_it_is_an_error_of_the_load(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with serving(root, model_control_mode="explicit") as url:
        told = load(url, "new", config=json.dumps(CONFIG), **{"file:1/x": encoded("x")})
    assert told == (500, {"error": "failed to write the files to load model 'new' with: No such file or directory"})
