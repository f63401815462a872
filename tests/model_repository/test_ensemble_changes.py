"""Ensembles and their members: loaded for one another, in rings, unloaded, reloaded, and such that do not fit."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.lifecycle.model_index import ModelEntry
from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.model_repository.request.status_code import Code, StatusError
from tests.model_repository.test_lifecycle import control, index, infer
from tests.support.ensembles import Link, asking, ensemble
from tests.support.loaded import Loaded, becomes
from tests.support.repository import ADD_SUB, REPEAT, identity, serving, write_models

SAME = identity("INT32", "4", "max_batch_size: 8")
ONES = np.ones((1, 4), np.int32)


def through(*models: str) -> str:
    """An ensemble of models one after the other, from INPUT0 to OUTPUT0."""
    tensors = ["INPUT0", *(f"t{k}" for k in range(1, len(models))), "OUTPUT0"]
    links: list[Link] = [(model, {"INPUT0": tensors[k]}, {"OUTPUT0": tensors[k + 1]}) for k, model in enumerate(models)]
    return ensemble(["INPUT0"], ["OUTPUT0"], links)


async def answers(repository: ModelRepository, name: str) -> bool:
    model = repository.get(name)
    return np.array_equal((await model.infer(asking(model, INPUT0=ONES))).outputs["OUTPUT0"], ONES)


def served(repository: ModelRepository) -> set[str]:
    return {model.name for model in repository.models()}


def test_members_are_loaded_with_an_ensemble_and_unloaded_when_that_is_asked(tmp_path: Path) -> None:
    models = {
        "a": SAME,
        "b": SAME,
        "c": SAME,
        "inner": through("b"),
        "pipe": through("a", "inner", "c"),
        "own": through("c"),
    }
    write_models(tmp_path, models)

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit") as repository:
            await repository.load("pipe")
            assert served(repository) == {"a", "b", "c", "inner", "pipe"} and await answers(repository, "pipe")
            await repository.load("own")
            await repository.load("a")
            await repository.unload("pipe", with_members=True)
            assert served(repository) == {"a", "c", "own"}, "a was asked for, c is needed; inner and b are neither"
            await repository.load("pipe")
            await repository.unload("pipe")
            assert served(repository) == {"a", "b", "c", "inner", "own"} and repository.is_ready()

    asyncio.run(run())


def looks_at_members(root: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a start of so many models, and as many ensembles of one each, asks one for its members."""
    write_models(root, {f"m{i}": SAME for i in range(n)} | {f"p{i}": through(f"m{i}") for i in range(n)})
    looks, members = list[ModelEntry](), vars(ModelEntry)["members"].fget

    def look(entry: ModelEntry) -> frozenset[str]:
        looks.append(entry)
        found: frozenset[str] = members(entry)
        return found

    async def run() -> None:
        async with Loaded(root) as repository:
            assert len(served(repository)) == 2 * n

    monkeypatch.setattr(ModelEntry, "members", property(look))
    asyncio.run(run())
    monkeypatch.undo()
    return len(looks)


def test_a_start_takes_time_as_models_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 36
    assert 0 < looks_at_members(tmp_path, n, monkeypatch) <= 6 * n, "one or two each, and not all at each of them"


def test_an_ensemble_goes_with_its_member_and_comes_back_with_it(tmp_path: Path) -> None:
    slow = SAME + 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'
    write_models(tmp_path, {"m": slow, "last": SAME, "inner": through("m", "last"), "pipe": through("inner")})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("pipe",)) as repository:
            under_way = asyncio.ensure_future(answers(repository, "pipe"))
            await becomes(lambda: repository.get("m")._n_open == 1)
            await repository.unload("last")
            assert served(repository) == {"m"} and repository.is_ready(), "it was the wish of whoever unloaded it"
            assert await under_way, "what was taken is answered, by the member that is on its way out, too"
            told = {one["name"]: one.get("reason") for one in await repository.index(only_ready=False)}
            assert told["inner"] == "ensemble 'inner' depends on 'last' which has no loaded version"
            await repository.load("last")
            await becomes(lambda: served(repository) == {"m", "last", "inner", "pipe"})
            assert await answers(repository, "pipe") and repository.is_ready()
            await repository.unload("pipe")
            await repository.load("last")
            await repository.load("m")
            assert served(repository) == {"m", "last", "inner"}, "what was unloaded by wish stays away"

    asyncio.run(run())


def test_a_member_is_reloaded_while_requests_are_under_way(tmp_path: Path) -> None:
    write_models(tmp_path, {"a": SAME, "b": SAME + "dynamic_batching {}", "pipe": through("a", "b")})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("pipe",)) as repository:

            async def ask() -> None:
                for _ in range(100):
                    assert await answers(repository, "pipe")
                    await asyncio.sleep(0)

            asking_ = [asyncio.ensure_future(ask()) for _ in range(4)]
            for _ in range(5):
                await repository.load("b")
                await repository.load("pipe")
            await asyncio.gather(*asking_)
            # reloaded with other tensors, it fits no more; the ensemble is not served then, and says so
            (tmp_path / "b" / "config.pbtxt").write_text(SAME.replace("INT32", "FP32"))
            await repository.load("b")
            assert served(repository) == {"a", "b"}
            (tmp_path / "b" / "config.pbtxt").write_text(SAME)
            await repository.load("b")
            await becomes(lambda: "pipe" in served(repository))
            assert await answers(repository, "pipe")

    asyncio.run(run())


def test_rings_are_refused_and_wait_for_nobody(tmp_path: Path) -> None:
    write_models(
        tmp_path, {"m": SAME, "a": through("b"), "b": through("c"), "c": through("a"), "self": through("self")}
    )

    async def run() -> None:
        repository = ModelRepository(Loaded(tmp_path).repository.flags)
        async with asyncio.timeout(10):
            errors = await repository.start()
        assert len(errors) == 4 and served(repository) == {"m"}
        assert any("circular dependency between ensembles: self -> ... -> self -> self" in e for e in errors)
        # Whose folder is read last closes the ring, and the others may try it again: which one says so is chance.
        ring = [e for e in errors if "'self'" not in e]
        assert len(ring) == 3 and any("Invalid argument: circular dependency between ensembles: " in e for e in ring)
        assert all("circular dependency" in e or "which has no loaded version" in e for e in ring)
        await repository.close(1)
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("m",)) as other, asyncio.timeout(10):
            for name in ("a", "b"):  # configurations that clients bring, at the same time
                (tmp_path / name / "config.pbtxt").write_text(SAME)
            given = {name: told(through(by)) for name, by in (("a", "b"), ("b", "a"))}
            found = await asyncio.gather(*(other.load(n, config=c) for n, c in given.items()), return_exceptions=True)
            assert any("circular dependency" in str(e) for e in found) and "m" in served(other)
            assert not {"a", "b"} <= served(other) or not all(isinstance(e, StatusError) for e in found)

    asyncio.run(run())


def told(text: str) -> Mapping[str, object]:
    """A configuration as a client writes it."""
    step = {"model_name": text.split('model_name: "')[1].split('"')[0], "model_version": -1,
            "input_map": {"INPUT0": "INPUT0"}, "output_map": {"OUTPUT0": "OUTPUT0"}}  # fmt: skip
    tensor = {"data_type": "TYPE_INT32", "dims": [4]}
    return {
        "platform": "ensemble", "max_batch_size": 8, "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}], "ensemble_scheduling": {"step": [step]},
    }  # fmt: skip


def test_an_ensemble_comes_when_its_member_is_fixed(tmp_path: Path) -> None:
    """By what the folders say: nothing of the ensemble's own folder changes."""
    write_models(tmp_path, {"m": SAME.replace("max_batch_size", "max_batchsize"), "pipe": through("m")})

    async def run() -> None:
        repository = ModelRepository(
            Loaded(tmp_path, model_control_mode="poll", repository_poll_secs=0.1).repository.flags
        )
        errors = await repository.start()
        assert len(errors) == 2 and "ensemble 'pipe' depends on 'm' which has no loaded version" in errors[1]
        write_models(tmp_path, {"m": SAME})
        await becomes(lambda: served(repository) == {"m", "pipe"})
        assert await answers(repository, "pipe")
        await repository.close(1)

    asyncio.run(run())


MISFITS = [
    (through("m").replace("TYPE_INT32", "TYPE_FP32", 1), "ensemble tensor INPUT0: inconsistent data type: TYPE_FP32 is "
     "inferred from model e while TYPE_INT32 is inferred from model m"),
    (through("m").replace("dims: [ 4 ]", "dims: [ 5 ]", 1), "ensemble tensor INPUT0: inconsistent shape: [-1,5] is "
     "inferred from model e while [-1,4] is inferred from model m"),
    (through("m", "wide"), "ensemble tensor t1: inconsistent shape: [-1,4] is inferred from model m while [-1,4,1] "
     "is inferred from model wide"),
    (through("m").replace('"INPUT0" value', '"INPUT9" value'), "in ensemble e, ensemble tensor INPUT0 is mapping to "
     "non-existing input INPUT9 in model m"),
    (through("m").replace('"OUTPUT0" value', '"OUTPUT9" value'), "ensemble tensor OUTPUT0 is mapped from non-existing "
     "output OUTPUT9 in model m"),
    (through("sums"), "in ensemble e, input INPUT1 in model sums is not mapped to any ensemble tensors"),
    (through("m").replace("max_batch_size: 8", "max_batch_size: 9"), "ensemble e allows maximum batch size 9, but it "
     "contains model m which only allows maximum batch size to be 8"),
    (through("m").replace('model_name: "m"', 'model_name: "m" model_version: 2'), "ensemble 'e' depends on 'm' version "
     "2 which has no loaded version: Request for unknown model: 'm' version 2 is not found"),
    (through("one", "one").replace("8", "0"), "ensemble 'e' has 2 decoupled models, one, one; at most one "
     "is supported"),
    (through("one").replace("8", "0") + "response_cache { enable: true }", "Response Cache does not currently support "
     "model e with 'decoupled' transaction policy. Please disable the response cache."),
]  # fmt: skip
N_BEFORE = 7  # of these, the first: the others depend on what is loaded


@pytest.mark.parametrize(("config", "says"), MISFITS, ids=range(len(MISFITS)))
def test_ensembles_that_do_not_fit_their_members_are_refused(tmp_path: Path, config: str, says: str) -> None:
    decoupled = SAME.replace("8", "0") + "model_transaction_policy { decoupled: true }"
    others = {
        "m": SAME,
        "wide": SAME.replace("[ 4 ]", "[ 4, 1 ]"),
        "sums": ADD_SUB.replace("16", "4"),
        "one": decoupled,
    }
    write_models(tmp_path, {**others, "e": config})
    found = [problem.what for model in read_repositories([tmp_path])[0].models for problem in model.problems]
    if config in [misfit for misfit, _ in MISFITS[:N_BEFORE]]:
        assert says in found[0], "`lint` says it before"

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=tuple(others)) as repository:
            with pytest.raises(StatusError) as refused:
                await repository.load("e")
            assert refused.value.code is Code.INTERNAL and says in str(refused.value)
            assert str(refused.value).startswith("load failed for model 'e': version 1 is at UNAVAILABLE state: ")
            assert served(repository) == set(others)

    asyncio.run(run())


def test_ensembles_in_ensembles_have_an_end(tmp_path: Path) -> None:
    names = [f"e{k:02}" for k in range(18)]
    write_models(tmp_path, {"m": SAME, **{n: through(i) for n, i in zip(names, ["m", *names], strict=False)}})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit") as repository:
            await repository.load("e15")
            assert await answers(repository, "e15")
            with pytest.raises(StatusError, match="'e16' is made of ensembles in 17 levels, at most 16 are supported"):
                await repository.load("e16")

    asyncio.run(run())


def test_few_files_are_not_many_requests(tmp_path: Path) -> None:
    """Each ensemble asks the one before it four times: in seven levels, 4 ** 7 requests for one."""
    several = ensemble(["INPUT0"], list("abcd"), [("%s", {"INPUT0": "INPUT0"}, {"%s": one}) for one in "abcd"])

    def of(model: str, outputs: str) -> str:
        return several.replace('model_name: "%s"', f'model_name: "{model}"').replace('"%s"', f'"{outputs}"')

    names = [f"e{k}" for k in range(7)]
    models = {n: of(i, "OUTPUT0" if i == "m" else "a") for n, i in zip(names, ["m", *names], strict=False)}
    write_models(tmp_path, {"m": SAME, **models})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit") as repository:
            await repository.load("e4")
            with pytest.raises(StatusError) as refused:
                await repository.load("e6")
            said = str(refused.value)
            assert "ensemble 'e6' depends on 'e5' which has no loaded version. Model 'e5' loading failed with" in said
            assert "'e5' is made of 5460 steps, with those of its ensembles, at most 4096 are supported" in said
            assert served(repository) == {"m", *names[:5]}
            model = repository.get("e2")
            assert (await model.infer(asking(model, ["a"], INPUT0=ONES))).outputs["a"].tolist() == ONES.tolist()
            assert repository.get("m").statistics.n_inferences == 1, "only what was asked for"

    asyncio.run(run())


def test_an_ensemble_of_ensembles_follows_what_is_far_below(tmp_path: Path) -> None:
    """A member becomes decoupled: so does what is made of what is made of it."""
    write_models(tmp_path, {"m": SAME, "inner": through("m"), "pipe": through("inner"), "twice": through("m", "m")})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("*",)) as repository:
            assert not repository.get("pipe").is_decoupled
            (tmp_path / "m" / "config.pbtxt").write_text(SAME + "model_transaction_policy { decoupled: true }")
            await repository.load("m")
            assert repository.get("inner").is_decoupled and repository.get("pipe").is_decoupled
            assert served(repository) == {"m", "inner", "pipe"} and not repository.is_ready()

    asyncio.run(run())


def test_over_http(tmp_path: Path) -> None:
    """With labels of the member, statistics, and what a decoupled member makes of the ensemble."""
    labelled = SAME.replace('name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"')
    stream = """platform: "ensemble"
input [ { name: "v" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "d" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "w" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output { name: "o" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling { step { model_name: "repeat" input_map [ { key: "IN" value: "v" }, { key: "DELAY" value: "d" },
    { key: "WAIT" value: "w" } ] output_map { key: "OUT" value: "o" } } }"""
    write_models(tmp_path, {"m": labelled, "pipe": through("m"), "repeat": REPEAT, "stream": stream})
    (tmp_path / "m" / "labels.txt").write_text("zero\none\ntwo\nthree\n")
    tensor = {"name": "INPUT0", "shape": [1, 4], "datatype": "INT32", "data": [1, 2, 9, 4]}
    body = {
        "id": "7", "inputs": [tensor],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}],
    }  # fmt: skip
    with serving(tmp_path, model_control_mode="explicit", load_model=("*",)) as url:
        found = infer(url, "pipe", body).json()
        assert (found["id"], found["model_name"]) == ("7", "pipe") and found["outputs"][0]["data"] == ["9:2:two"]
        wrong = infer(url, "pipe", {"inputs": [{**tensor, "shape": [4]}]})
        assert wrong.status_code == 400 and "unexpected shape for input 'INPUT0' for model 'pipe'" in wrong.text
        assert httpx.get(f"{url}/v2/models/pipe").json()["platform"] == "ensemble"
        (stats,) = httpx.get(f"{url}/v2/models/pipe/stats").json()["model_stats"]
        assert (stats["inference_count"], stats["execution_count"]) == (1, 1)
        assert stats["inference_stats"]["success"]["ns"] >= stats["inference_stats"]["compute_infer"]["ns"] > 0
        assert httpx.get(f"{url}/v2/models/stream/config").json()["model_transaction_policy"] == {"decoupled": True}
        assert infer(url, "stream", {"inputs": []}).status_code == 501
        asked = json.dumps({"v": [3, 4], "d": [0, 0], "w": 0})
        with httpx.stream("POST", f"{url}/v2/models/stream/generate_stream", content=asked) as events:
            told_ = [json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line]
        assert [event["o"] for event in told_] == [3, 4]
        with_members = {"parameters": {"unload_dependents": True}}
        assert control(url, "pipe", "unload", with_members) == (200, "")
        assert {one["name"] for one in index(url) if one.get("state") == "READY"} == {"m", "repeat", "stream"}
