"""Programs in the native core, as hostile engines, threads, forks and forgetful callers use them."""

import copy
import gc
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST, Manifest, sealed
from millrace.engine.executor import ExecutionError, ExecutorLimits, StepInputs
from millrace.engine.native import executor as native_executor
from millrace.engine.native.executor import StatelessExecutor
from millrace.engine.native.step_arrays import step_args
from millrace.errors import ConfigError, EngineError, MillraceError, RequestError
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, prompts_as_step
from tests.support.networks import encoder, packed, texts

Table = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return encoder(tmp_path_factory.mktemp("encoder") / "engine", "fp32")


@pytest.fixture
def loaded(engine: Engine) -> Iterator[StatelessExecutor]:
    network = engine.stateless_executor(threads=2)
    yield network
    network.close()


def resealed(folder: Path, out: Path, change: Callable[[Table], object]) -> Path:
    """The same engine with another manifest, its checksum right where it is a manifest still."""
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    table = json.loads((folder / MANIFEST).read_bytes())
    change(table)
    data = json.dumps(table).encode()
    with suppress(msgspec.ValidationError):
        data = msgspec.json.encode(sealed(msgspec.json.decode(data, type=Manifest)))
    (out / MANIFEST).write_bytes(data)
    return out


def named(table: Table, side: str, name: str) -> Table:
    found: Table = next(s for s in table["cpu"][side] if s["name"] == name)
    return found


HOSTILE: dict[str, tuple[Callable[[Table], object], str]] = {
    "lengths of another name": (lambda m: named(m, "inputs", "lengths").update(name="lengthz"), "works on sequences"),
    "lengths nowhere": (lambda m: named(m, "inputs", "lengths").update(offset=None), "works on sequences"),
    "an output nowhere": (lambda m: named(m, "outputs", "embeddings").update(offset=None), "embeddings has no place"),
    "an output too large": (lambda m: named(m, "outputs", "embeddings").update(shape=["S", 2**20]), "ends at byte"),
    "an output of 33 dimensions": (lambda m: named(m, "outputs", "embeddings").update(shape=["S"] + 32 * [1]), "32"),
    "a symbol of no input": (
        lambda m: m["symbols"].append({"name": "x", "low": 1, "usual": 1, "high": 1}), "without T and S"
    ),
    "lengths of numbers": (lambda m: named(m, "inputs", "lengths").update(shape=[8]), "no input tells: S"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_resealed_encoder_says(engine: Engine, name: str, tmp_path: Path) -> None:
    change, says = HOSTILE[name]
    with pytest.raises(EngineError, match=says):
        Engine.open(resealed(engine.folder, tmp_path, change)).stateless_executor(threads=1)


def test_bounds_that_a_step_would_not_fit_are_refused_at_load(tmp_path: Path) -> None:
    """With fewer rows of logits than sequences, a step in which all of them draw a token would raise."""
    model = build(random_checkpoint(tmp_path / "model", "llama", seed=1), tmp_path / "good", "bf16", max_step_tokens=64)
    assert [(s.name, s.high) for s in model.manifest.symbols[:2]] == [("T", 64), ("S", 8)]
    rows, tokens = 2, 0  # places of R and T among the symbols
    changes: list[tuple[int, Table, str]] = [(rows, {"high": n, "usual": 1}, f"and {n} rows of") for n in (1, 2, 7)]
    changes += [(tokens, {"high": 7, "usual": 7}, "of 7 tokens"), (rows, {"usual": 4096}, "not in order")]
    changes += [(rows, {"low": 9, "usual": 8}, "low 9, usual 8"), (tokens, {"low": 65}, "not in order")]
    for i, (place, change, says) in enumerate(changes):
        (bad := tmp_path / str(i)).mkdir()
        broken = resealed(model.folder, bad, lambda m, p=place, c=change: m["symbols"][p].update(c))  # type: ignore[misc]
        with pytest.raises(EngineError, match=says):
            Engine.open(broken)
    (few := tmp_path / "few").mkdir()
    least = Engine.open(resealed(model.folder, few, lambda m: m["symbols"][rows].update(high=8, usual=8)))
    with closing(least.executor(n_pages=8, threads=1)) as executor:
        assert len(executor.run(prompts_as_step([[i + 1] for i in range(8)])).tokens) == 8


def test_outputs_of_a_language_model_are_checked_too(tmp_path: Path) -> None:
    model = build(random_checkpoint(tmp_path / "model", "llama", seed=1), tmp_path / "good", "bf16")
    for i, change in enumerate(({"shape": ["R", 2**20]}, {"offset": None})):
        (bad := tmp_path / str(i)).mkdir()
        broken = resealed(model.folder, bad, lambda m, c=change: named(m, "outputs", "logits").update(c))  # type: ignore[misc]
        with pytest.raises(EngineError, match=r"logits (has no place|ends at byte)"):
            Engine.open(broken).executor(n_pages=4, threads=1)
    executor = model.executor(n_pages=4, threads=1)
    executor.run(prompts_as_step([[1, 2, 3]]))
    assert executor.output("logits").shape == (1, model.manifest.vocab_size)
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.run(prompts_as_step([[1, 2, 3]]))


# ------------------------------------------------------------------ who uses it


def test_threads_take_turns(loaded: StatelessExecutor) -> None:
    """Each gets its own answer, however their runs come between each other."""
    inputs = [packed(texts((5, 70, 1))), packed(texts((300, 17, 64), seed=2))]
    expected = [loaded.run(i)["embeddings"] for i in inputs]
    wrong: list[object] = []

    def use(mine: int) -> None:
        for _ in range(40):
            got = loaded.run(inputs[mine])["embeddings"]
            if got.shape != expected[mine].shape or (got != expected[mine]).any():
                wrong.append(got)

    threads = [threading.Thread(target=use, args=(i,)) for i in (0, 1, 0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


USES: dict[str, Callable[[StatelessExecutor], object]] = {
    "run": lambda n: n.run(packed(texts((3,)))), "compute": lambda n: n.compute([1, 1]),
    "activations": lambda n: n.activations(), "weights_checksum": lambda n: n.weights_checksum(),
    "set_tactics": lambda n: n.set_tactics([]), "chosen_tactics": lambda n: n.chosen_tactics(),
    "profile": lambda n: n.profile(True),
}  # fmt: skip


def test_every_use_after_close_is_told(loaded: StatelessExecutor) -> None:
    loaded.close()
    loaded.close()
    for name, use in USES.items():
        with pytest.raises(EngineError, match="this engine is closed"):
            raise AssertionError(f"{name} gave {use(loaded)}")
    assert loaded.isa


def test_close_waits_for_the_run_on_its_way(loaded: StatelessExecutor) -> None:
    inputs, begun, told = packed(texts((300, 100))), threading.Event(), []

    def use() -> None:
        try:
            while True:
                loaded.run(inputs)
                begun.set()
        except EngineError as error:
            told.append(error.what)

    user = threading.Thread(target=use)
    user.start()
    assert begun.wait(60)
    loaded.close()
    user.join(60)
    assert told == ["this engine is closed"]


def test_what_is_looked_at_stays(loaded: StatelessExecutor) -> None:
    loaded.run(packed(texts()))
    before = n_threads()
    view = loaded.activations()[64:]
    held = view.tobytes()
    loaded.close()
    assert view.tobytes() == held and n_threads() == before
    del view
    assert n_threads() == before - 1


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(loaded: StatelessExecutor, way: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match="cannot be pickled or copied"):
        way(loaded)


def n_threads() -> int:
    """Those of the native core included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_who_forgets_close_loses_nothing(engine: Engine) -> None:
    gc.collect()
    before = n_threads()
    for _ in range(3):
        engine.stateless_executor(threads=3).run(packed(texts((2, 3))))
    assert n_threads() <= before, "or fewer: what other tests began may have ended"


def test_an_error_that_is_kept_keeps_no_memory(engine: Engine) -> None:
    before, loaded = n_threads(), engine.stateless_executor(threads=2)
    wrong = {**packed(texts((2, 3))), "lengths": np.array([9, 9], np.int32)}
    with pytest.raises(ExecutionError) as error:
        loaded.run(wrong)
    loaded.close()
    assert n_threads() <= before and "length" in str(error.value)


def test_a_forked_child_is_told(engine: Engine) -> None:
    """Also where a thread of the parent was in the middle of a run; nothing of the parent's ends with it."""
    loaded = engine.stateless_executor(threads=2)
    inputs = packed(texts((5, 70, 1)))
    good = loaded.run(inputs)["embeddings"]
    read, write = os.pipe()
    with loaded._turn:
        child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            loaded.run(inputs)
        except MillraceError as error:
            said = str(error)
        finally:
            loaded.close()
            del loaded
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as words:
        assert "before the process was forked" in words.read()
    assert os.waitpid(child, 0)[1] == 0
    assert (loaded.run(inputs)["embeddings"] == good).all()
    loaded.close()


# ------------------------------------------------------------------ what it is given


@pytest.mark.parametrize("sizes", [[0, 1], [1], [1, 2, 3], [-1, 1], [2**31, 1], [2.7, 1.2], ["a", 1], None, 7])
def test_sizes_are_whole_numbers_within_bounds(loaded: StatelessExecutor, sizes: Any) -> None:
    with pytest.raises(RequestError, match=r"whole numbers: T from 1 to 512, S from 1 to 8"):
        loaded.compute(sizes)


@pytest.mark.parametrize(
    "inputs, says",
    [
        ({**packed(texts()), "tokens": [1, 2]}, r"tokens is of type list[\s\S]*numpy.array\(..., numpy.int32\)"),
        ({**packed(texts()), "tokens": None}, "of type NoneType"),
        ({**packed(texts()), "tokens": np.int32(3)}, "of type int32"),
        (None, "the inputs are of type NoneType"),
        ([1, 2], "the inputs are of type list"),
    ],
)
def test_inputs_are_arrays_by_name(loaded: StatelessExecutor, inputs: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        loaded.run(inputs)


def test_every_launch_has_its_wait(tmp_path: Path) -> None:
    """Depth 1: what was launched is what `wait` gives, once; a second launch does not take the first one's place."""
    executor = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32").executor(n_pages=4)
    first, second = prompts_as_step([[5, 6, 7]]), prompts_as_step([[9, 8], [3]])
    alone = [executor.run(step).tokens.tolist() for step in (first, second)]
    with pytest.raises(ExecutionError, match="nothing was launched"):
        executor.wait()
    executor.launch(first)
    with pytest.raises(ExecutionError, match="not waited for"):
        executor.launch(second)
    assert executor.wait().tokens.tolist() == alone[0]
    with pytest.raises(ExecutionError, match="nothing was launched"):
        executor.wait()
    bad = prompts_as_step([[5, 10**6]])
    with pytest.raises(ExecutionError):
        executor.launch(bad)
    executor.launch(second)  # a launch that failed is none
    assert executor.wait().tokens.tolist() == alone[1]
    executor.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_whoever_comes_late_finds_the_same_answer(tmp_path: Path, threads: int) -> None:
    """Between launch and wait the other threads compute alone; what they leave, the caller does."""
    engine = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32")
    steps = [prompts_as_step([[5, 6, 7], [9, 8]]), prompts_as_step([[1 + i % 50 for i in range(40)]])]
    with (
        closing(engine.executor(n_pages=4, threads=1)) as alone,
        closing(engine.executor(n_pages=4, threads=threads)) as executor,
    ):
        for late_s in (0, 0.0001, 0.001, 0.03):
            for step in steps:
                expected = alone.run(step), alone.output("logits").tobytes()
                executor.launch(step)
                time.sleep(late_s)
                found = executor.wait(), executor.output("logits").tobytes()
                assert found[1] == expected[1] and found[0].tokens.tolist() == expected[0].tokens.tolist()


def test_what_changes_runs_waits_for_the_one_under_way(tmp_path: Path) -> None:
    engine = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32")
    step = prompts_as_step([[1 + i % 50 for i in range(40)]])
    with closing(engine.executor(n_pages=4)) as executor:
        expected = executor.run(step).tokens.tolist()
        logits, pages = executor.output("logits").tobytes(), [kept.tobytes() for kept in executor.kv_pages()]
        executor.run(prompts_as_step([[9, 8]]))
        for meanwhile in (lambda: executor.set_tactics([]), executor.chosen_tactics, lambda: executor.profile(True)):
            executor.launch(step)
            meanwhile()
            assert executor.wait().tokens.tolist() == expected
        executor.run(step)
        assert (executor.profile(False) > 0).any()
        executor.run(prompts_as_step([[9, 8]]))
        executor.launch(step)
        assert executor.output("logits").tobytes() == logits
        executor.wait()
        executor.run(prompts_as_step([[9, 8]]))
        executor.launch(step)
        assert [kept.tobytes() for kept in executor.kv_pages()] == pages
        executor.wait()


@pytest.mark.parametrize("at", ["mr_wait", "mr_launch"])
def test_ctrl_c_gives_one_step_up_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Python tells of it once the native core has returned: before anything is noted."""
    engine = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32")
    step = prompts_as_step([[5, 6, 7]])
    with closing(engine.executor(n_pages=4)) as executor:
        expected, call = executor.run(step).tokens.tolist(), getattr(executor._lib, at)

        def interrupted(*arguments: object) -> None:
            call(*arguments)
            raise KeyboardInterrupt

        executor.launch(step)
        monkeypatch.setattr(executor, "_lib", Named(executor._lib, **{at: interrupted}))
        with pytest.raises(KeyboardInterrupt):
            executor.wait()
            executor.launch(step)
        monkeypatch.undo()
        for _ in range(2):
            assert executor.run(step).tokens.tolist() == expected


class Named:
    """As something else, but for these."""

    def __init__(self, other: object, **own: object) -> None:
        self._other = other
        vars(self).update(own)

    def __getattr__(self, name: str) -> object:
        return getattr(self._other, name)


def test_a_launch_that_comes_between_leaves_the_arrays_of_the_one_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that launch, one is refused; the other's step goes on writing into what is its own."""
    engine = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32")
    first, second = prompts_as_step([[5, 6, 7]]), prompts_as_step([[9, 8]])
    with closing(engine.executor(n_pages=4)) as executor:
        expected, prepared = executor.run(first).tokens.tolist(), step_args

        def meanwhile(step: StepInputs, limits: ExecutorLimits) -> object:
            if step is second:
                executor.launch(first)
            return prepared(step, limits)

        monkeypatch.setattr(native_executor, "step_args", meanwhile)
        with pytest.raises(ExecutionError, match="not waited for"):
            executor.launch(second)
        assert executor._core is not None and executor._core.works_on[0] is first
        assert executor.wait().tokens.tolist() == expected


def test_a_launched_step_that_nobody_waits_for_ends_with_its_engine(tmp_path: Path) -> None:
    """Its arrays live as long as threads may write into them."""
    engine = build(random_checkpoint(tmp_path / "llama", "llama"), tmp_path / "engine", "fp32")
    for _ in range(20):
        executor = engine.executor(n_pages=4, threads=2)
        executor.launch(prompts_as_step([[5, 6, 7]]))
        executor.close()
        with pytest.raises(EngineError, match="this engine is closed"):
            executor.wait()
        forgotten = engine.executor(n_pages=4, threads=2)
        forgotten.launch(prompts_as_step([[5, 6, 7]]))
        del forgotten
