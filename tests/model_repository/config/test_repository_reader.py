"""Folders of a repository: versions and their policies, files, links, names; a bad model hides no other."""

import os
from pathlib import Path

import pytest

from millrace.errors import ConfigError, RequestError
from millrace.model_repository.config.problems import Level
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.repository.model_names import ModelId, check_model_name
from millrace.model_repository.repository.multi_repository import Repositories, read_repositories
from millrace.model_repository.repository.repository_reader import ModelFolder, Repository, read_repository


def write(root: Path, files: dict[str, str]) -> Path:
    """A name that ends in / is a folder."""
    for name, text in files.items():
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    return root


def model(root: Path, files: dict[str, str], config_name: str = "") -> ModelFolder:
    (found,) = read_repository(write(root, {f"m/{name}": text for name, text in files.items()}), config_name).models
    return found


def said(found: ModelFolder | Repository, root: Path, *levels: Level) -> list[str]:
    """`m/config.pbtxt:1:1 what`."""
    shown = [p for p in found.problems if p.level in (levels or (Level.ERROR,))]
    return [f"{p.location.removeprefix(str(root) + '/')} {p.what}".replace(str(root) + "/", "") for p in shown]


THREE = {"1/model.py": "", "3/model.py": "", "12/model.py": ""}


@pytest.mark.parametrize(
    ("policy", "served"),
    [("", (12,)), ("latest {num_versions: 2}", (3, 12)), ("latest {num_versions: 9}", (1, 3, 12)),
     ("all {}", (1, 3, 12)),
     ("specific {versions: [12, 1]}", (1, 12)), ("latest {}", ()), ("specific {}", ())],
)  # fmt: skip
def test_version_policies(tmp_path: Path, policy: str, served: tuple[int, ...]) -> None:
    text = f"version_policy {{ {policy} }}" if policy else ""
    found = model(tmp_path, {**THREE, "config.pbtxt": text})
    assert (found.versions, found.served) == ((1, 3, 12), served), "by number, not by letters"
    none = "m/config.pbtxt:1:1 at least one version must be available under the version policy of model 'm'"
    assert said(found, tmp_path) == ([] if served else [none])


@pytest.mark.parametrize(
    ("text", "file", "what"),
    [
        ('\nplatform: "tensorrt_plan"', "model.plan", "2:1 backend tensorrt needs a GPU"),
        ('backend: "tensorrt"', "model.plan", "1:1 backend tensorrt needs a GPU"),
        (
            '\n platform: "tensorflow_graphdef"',
            "model.graphdef",
            "2:2 platform 'tensorflow_graphdef' of model 'm' is not",
        ),
        ('backend: "tensorflow"', "model.graphdef", "1:1 platform 'tensorflow_graphdef' of model 'm' is not supported"),
    ],
)
def test_what_nothing_runs_here_is_said_where_it_stands(tmp_path: Path, text: str, file: str, what: str) -> None:
    (error,) = said(model(tmp_path, {f"1/{file}": "", "config.pbtxt": text}), tmp_path)
    assert error.startswith(f"m/config.pbtxt:{what}")


def test_a_specific_version_that_is_not_there(tmp_path: Path) -> None:
    found = model(tmp_path, {**THREE, "config.pbtxt": "version_policy { specific {\n versions: [ 3, 4 ] } }"})
    assert found.served == (3,) and found.is_servable
    assert said(found, tmp_path, Level.WARNING) == [
        "m/config.pbtxt:2:17 version 4 is specified, and there is no folder 4"
    ]


def test_folders_that_are_no_versions(tmp_path: Path) -> None:
    names = (
        "0",
        "01",
        "v1",
        "-1",
        "1.0",
        "9" * 19,
        "9" * 200,
        "\u0661",
        "configs",
    )
    more = {f"{name}/": "" for name in (*names, "warmup", ".git", "__pycache__")}
    found = model(tmp_path, {"7/model.py": "", "README": "", str(2**63 - 1) + "/": "", **more})
    assert found.versions == (7, 2**63 - 1)
    ignored = said(found, tmp_path, Level.IGNORED)
    assert [line.split()[0].removeprefix("m/") for line in ignored] == sorted(n for n in names if n != "configs")


def test_a_bad_model_hides_no_other(tmp_path: Path) -> None:
    files = {"a/1/model.py": "", "b/1/model.py": "", "b/config.pbtxt": "max_batchsize: 1", "c/1/model.onnx": "",
             "d/": "",
             "e/1/model.py": "", "e/config.pbtxt/": "", ".git/": "", "notes.txt": ""}  # fmt: skip
    found = read_repository(write(tmp_path, files))
    assert [(m.name, m.is_servable) for m in found.models] == [
        ("a", True), ("b", False), ("c", True), ("d", False), ("e", False)]  # fmt: skip
    assert said(found, tmp_path, Level.IGNORED) == [".git not read", "notes.txt not read"]
    assert found.models[0].config.backend == "python" and found.models[2].config.backend == "onnxruntime"
    assert said(found.models[1], tmp_path) == ['b/config.pbtxt:1:1 "max_batchsize" is no field of a configuration']
    assert said(found.models[3], tmp_path)[-1].startswith("d/config.pbtxt must specify 'platform' or 'backend' for 'd'")
    assert said(found.models[4], tmp_path) == ["e/config.pbtxt not a file"]


def test_the_name_of_the_folder(tmp_path: Path) -> None:
    found = model(tmp_path, {"1/model.py": "", "config.pbtxt": "backend: 'python'\nname: 'x'"})
    what = "unexpected directory name 'm' for model 'x', directory name must equal model name"
    assert said(found, tmp_path) == [f"m/config.pbtxt:2:1 {what}"]


LABELLED = "output { name: 'y' data_type: TYPE_FP32 dims: 2\n label_filename: '%s' }"


def test_labels(tmp_path: Path) -> None:
    found = model(tmp_path, {"1/model.py": "", "config.pbtxt": LABELLED % "l.txt", "l.txt": "cat\r\ndög\n\nbird\n"})
    assert found.labels == {"y": ("cat", "dög", "", "bird")} and found.is_servable, "an empty line is a label"
    (tmp_path / "m" / "l.txt").write_bytes(b"caf\xe9")
    (found,) = read_repository(tmp_path).models
    assert said(found, tmp_path)[0].startswith("m/config.pbtxt:2:2 m/l.txt has no labels: 'utf-8' codec")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../../secret", "..", "a\\000b"])
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"secret": "x", "repository/m/a/": ""})
    found = model(tmp_path / "repository", {"1/model.py": "", "config.pbtxt": LABELLED % name})
    (line,) = said(found, tmp_path / "repository")
    assert line.startswith("m/config.pbtxt:2:2 ") and line.endswith("leaves the model's folder") and not found.labels


def test_files_that_are_not_there(tmp_path: Path) -> None:
    warm = "model_warmup { name: 'w' batch_size: 1 inputs { key: 'x' value { data_type: TYPE_INT8 dims: 2\n"
    warm += " input_data_file: 'raw' } } }"
    find_by_name = "input_name: 'a' output_name: 'b' data_type: TYPE_INT16 dims: 2 "
    first = "initial_state { name: 'z' data_type: TYPE_INT16 dims: 2\n data_file: 'zero' }"
    state = "\nsequence_batching { state { " + find_by_name + first + " } }"
    found = model(tmp_path, {"1/": "", "config.pbtxt": "default_model_filename: 'model.py'\n" + warm + state})
    assert said(found, tmp_path) == [
        "m/config.pbtxt:1:1 there is no m/1/model.py", "m/config.pbtxt:3:2 there is no m/warmup/raw",
        "m/config.pbtxt:5:2 there is no m/initial_state/zero"]  # fmt: skip
    write(tmp_path / "m", {"1/model.py": "", "warmup/raw": "1", "initial_state/zero": "123"})
    expects = "{} setting expects {} bytes, but the data provided from {} only has {} bytes"
    assert said(read_repository(tmp_path).models[0], tmp_path) == [
        "m/config.pbtxt:3:2 " + expects.format("warmup", 2, "raw", 1),
        "m/config.pbtxt:5:2 " + expects.format("initial_state", 4, "zero", 3) + "."]  # fmt: skip
    write(tmp_path / "m", {"warmup/raw": "12", "initial_state/zero": "1234"})
    assert read_repository(tmp_path).models[0].is_servable


def test_links(tmp_path: Path) -> None:
    """Inside they are followed; one that leads out, nowhere, or in a circle, is refused, and nothing there is read."""
    write(tmp_path, {"out/model/1/model.py": "", "out/config.pbtxt": "", "r/own/1/model.py": ""})
    root = tmp_path / "r"
    for name, target in (("inside", "own"), ("outside", "../out/model"), ("broken", "nowhere"), ("circle", "circle")):
        (root / name).symlink_to(target)
    write(root, {"config/1/model.py": "", "version/": "", "file/1/": ""})
    (root / "config" / "config.pbtxt").symlink_to("../../out/config.pbtxt")
    (root / "version" / "1").symlink_to("../../out/model/1")
    (root / "file" / "1" / "model.py").symlink_to("../../../out/model/1/model.py")
    found = {m.name: m for m in read_repository(root).models}
    assert {name for name, m in found.items() if m.is_servable} == {"own", "inside"}
    for name in ("outside", "broken", "circle"):
        assert said(found[name], root) == [f"{name} a link that leads out of the repository, or nowhere"]
    assert said(found["config"], root)[0].startswith("config/config.pbtxt a link that leads out")
    assert said(found["version"], root)[0].startswith("version/1 a link") and found["version"].versions == ()
    assert said(found["file"], root)[0].endswith(
        "file/1/model.py is a link that leads out of the repository, or nowhere"
    )


def test_a_pipe_for_a_configuration(tmp_path: Path) -> None:
    write(tmp_path, {"m/1/model.py": ""})
    os.mkfifo(tmp_path / "m" / "config.pbtxt")
    (found,) = read_repository(tmp_path).models
    assert said(found, tmp_path) == ["m/config.pbtxt not a file"]


def test_other_names_of_a_configuration(tmp_path: Path) -> None:
    files = {"1/model.py": "", "config.pbtxt": "max_batch_size: 1", "configs/h100.pbtxt": "max_batch_size: 2"}
    assert model(tmp_path, files).config.max_batch_size == 1
    assert model(tmp_path, files, "h100").config.max_batch_size == 2
    assert model(tmp_path, files, "a10").config.max_batch_size == 1, "where there is none, the usual one"
    for name in ("../config", "a/b", "/etc", ".."):
        with pytest.raises(ConfigError, match="model-config-name"):
            read_repository(tmp_path, name)


STEP = "platform: 'ensemble' %s ensemble_scheduling { step { model_name: '%s' input_map { key: 'a' value: 'a' } "
STEP += "output_map { key: 'b' value: 'b' } } }"
ENDS = "input { name: 'a' data_type: TYPE_FP32 dims: 1 } output { name: 'b' data_type: TYPE_FP32 dims: 1 }"


def test_steps_of_ensembles(tmp_path: Path) -> None:
    files = {"own/1/model.py": ""}
    for name, step in (
        ("good", "own"),
        ("self", "self"),
        ("x", "y"),
        ("y", "z"),
        ("z", "x"),
        ("to_z", "z"),
        ("lost", "no"),
    ):
        files |= {f"{name}/1/": "", f"{name}/config.pbtxt": STEP % (ENDS, step)}
    found = {m.name: said(m, tmp_path) for m in read_repositories([write(tmp_path, files)])[0].models}
    assert found["own"] == found["good"] == []
    ring = "circular dependency between ensembles: "
    assert found["self"] == [f"self/config.pbtxt:1:121 {ring}self -> ... -> self -> self"]
    assert found["x"] == [f"x/config.pbtxt:1:121 {ring}x -> ... -> z -> x"]
    assert found["to_z"] == [], "its circle is said of those that are in it"
    lost = "ensemble lost contains models that are not available or ambiguous: no"
    assert found["lost"] == [f"lost/config.pbtxt:1:150 {lost}"]


def test_several_repositories(tmp_path: Path) -> None:
    write(tmp_path, {"a/m/1/model.py": "", "a/n/1/model.py": "", "b/m/1/model.py": ""})
    roots = [tmp_path / "a", tmp_path / "b"]
    found = {f"{r.root.name}/{m.name}": said(m, tmp_path) for r in read_repositories(roots) for m in r.models}
    twice = "model appears in two or more repositories"
    assert found == {"a/m": [f"a/m {twice}"], "a/n": [], "b/m": [f"b/m {twice}"]}
    assert all(m.is_servable for r in read_repositories(roots, namespacing=True) for m in r.models)


def test_steps_of_ensembles_are_models_of_any_repository(tmp_path: Path) -> None:
    """Beside the ensemble, or the only one of that name elsewhere."""
    files = {f"{root}/m/1/model.py": "" for root in "ab"} | {"b/only/1/model.py": ""}
    for name, step in (("a/own", "m"), ("a/far", "only"), ("c/own", "m"), ("c/ring", "ring"), ("c/x", "far")):
        files |= {f"{name}/1/": "", f"{name}/config.pbtxt": STEP % (ENDS, step)}
    write(tmp_path, files)
    roots = [tmp_path / root for root in "abc"]
    found = {
        f"{r.root.name}/{m.name}": said(m, tmp_path)
        for r in read_repositories(roots, namespacing=True)
        for m in r.models
        if m.problems
    }
    assert found == {
        "c/own": ["c/own/config.pbtxt:1:150 ensemble c::own contains models that are not available or ambiguous: m"],
        "c/ring": [
            "c/ring/config.pbtxt:1:121 circular dependency between ensembles: c::ring -> ... -> c::ring -> c::ring"
        ],
    }
    without = read_repositories([roots[0], roots[1]])
    assert [p.what for m in without[0].models if m.name == "far" for p in m.problems] == []


@pytest.mark.parametrize("namespacing", [False, True])
@pytest.mark.parametrize("step", ["../secret", "%s", ".hidden", "x" * 300, "é" * 200, "..", "", "a\\000b"])
def test_a_step_is_no_path(tmp_path: Path, step: str, namespacing: bool) -> None:
    """Nothing beside the repository is looked at, and no name is an error of the system's."""
    step = step.replace("%s", str(tmp_path / "secret"))
    files = {f"{name}/1/": "" for name in ("r/e", "r/.hidden", "secret")}
    write(tmp_path, files | {"r/e/config.pbtxt": STEP % (ENDS, step)})
    of = Repositories((tmp_path / "r",), namespacing=namespacing)
    (one,) = of.find_by_name("e")
    read = of.read(one)
    assert read is not None and of.steps_of(read, one, {}) == {} and of.read(ModelId("", step)) is None
    assert of.find_by_name(step) == [ModelId("", step)]
    missing = f"ensemble {one} contains models that are not available or ambiguous: "
    (problem,) = read.problems
    assert problem.what.startswith(missing if step else "must specify 'model_name' in step 0")


def test_more_errors_than_are_listed(tmp_path: Path) -> None:
    unread = model(tmp_path, {"config.pbtxt": "x: 1\n" * 60})
    wrong = "input {}\n" * 60
    write(tmp_path, {"n/1/model.py": "", "n/config.pbtxt": wrong})
    unruly = read_repository(tmp_path).models[1]
    assert len(unread.problems) == len(unruly.problems) == 51
    assert unread.problems[-1].what == unruly.problems[-1].what == "more than 50 such"


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may read everything, so the refusal is made."""
    write(tmp_path, {"a/1/model.py": "", "b/1/model.py": ""})
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "a":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = read_repository(tmp_path).models
    assert [m.is_servable for m in found] == [False, True] and said(found[0], tmp_path)[0] == "a Permission denied"


def test_what_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        read_repository(tmp_path / "none")
    assert [p.what for p in read_repository(tmp_path).problems] == ["no model"]
    monkeypatch.setattr(repository_reader, "_MAX_ENTRIES", 3)
    write(tmp_path, {f"m{i}/1/model.py": "" for i in range(5)})
    found = read_repository(tmp_path)
    assert len(found.models) == 3 and [p.what for p in found.problems] == ["more than 3 entries"]


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "../x", "a\\b", "a\0"])
def test_names_from_clients(name: str) -> None:
    with pytest.raises(RequestError, match="path traversal" if name else "cannot be empty"):
        check_model_name(name)
    check_model_name("model.v1-x_y")
