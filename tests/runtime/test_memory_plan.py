"""The memory plan: decided before a weight is read; a refusal names what would fit."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millrace.compile.builder import build_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.errors import MachineError
from millrace.machine.cpu import Memory
from millrace.runtime.memory_plan import KV_SHARE, RESERVE, plan_run

MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build_engine("tiny", BUNDLED / "tiny", tmp_path_factory.mktemp("plan") / "engine", BuildSettings(tune=0))


def available(nbytes: int) -> Memory:
    return Memory(total_bytes=64 << 30, available_bytes=nbytes)


def fixed(engine: Engine) -> int:
    return engine.manifest.cpu.weights_bytes + engine.manifest.cpu.activation_bytes + RESERVE


def test_unasked_the_whole_batch_fits_where_there_is_room(engine: Engine) -> None:
    plan = plan_run(engine, available(8 << 30))
    assert plan.n_pages == engine.pages_per_sequence * engine.manifest.max_sequences
    assert plan.kv_bytes == plan.n_pages * engine.page_bytes
    assert plan.total_bytes == plan.kv_bytes + plan.weights_bytes + plan.activation_bytes


def test_unasked_a_share_of_what_is_free_where_there_is_less(engine: Engine) -> None:
    free = 40 * MIB
    plan = plan_run(engine, available(fixed(engine) + free))
    assert plan.n_pages == int(free * KV_SHARE) // engine.page_bytes
    assert plan.n_pages >= engine.pages_per_sequence


def test_asked_for_is_what_is_planned(engine: Engine) -> None:
    plan = plan_run(engine, available(8 << 30), 20 * MIB)
    assert plan.n_pages == 20 * MIB // engine.page_bytes and plan.kv_bytes <= 20 * MIB


def test_just_enough_for_one_sequence(engine: Engine) -> None:
    least = engine.pages_per_sequence * engine.page_bytes
    assert plan_run(engine, available(8 << 30), least).n_pages == engine.pages_per_sequence
    with pytest.raises(MachineError, match="for one sequence"):
        plan_run(engine, available(8 << 30), least - 1)


@pytest.mark.parametrize("kv_mib", [1, 2, 4])
def test_too_little_kv_memory_names_a_context_that_fits(engine: Engine, tmp_path: Path, kv_mib: int) -> None:
    with pytest.raises(MachineError) as refused:
        plan_run(engine, available(8 << 30), kv_mib * MIB)
    context = int(re.findall(r"--max-context (\d+)", refused.value.fix)[0])
    smaller = build_engine("tiny", BUNDLED / "tiny", tmp_path / "engine", BuildSettings(max_context=context, tune=0))
    assert plan_run(smaller, available(8 << 30), kv_mib * MIB).n_pages * PAGE_TOKENS >= context


@pytest.mark.parametrize("spare", [-10 * MIB, 0, 2 * MIB, 8 * MIB])
def test_p4_p5_p22_too_little_memory_says_what_is_needed_and_what_would_fit(engine: Engine, spare: int) -> None:
    with pytest.raises(MachineError) as refused:
        plan_run(engine, available(fixed(engine) + spare))
    assert "weights 9 MiB" in refused.value.what and "are available" in refused.value.what
    contexts = re.findall(r"--max-context (\d+)", refused.value.fix)
    if spare <= 0:
        assert not contexts and "free memory" in refused.value.fix
    else:
        manifest = msgspec.structs.replace(engine.manifest, max_context=int(contexts[0]))
        assert plan_run(replace(engine, manifest=manifest), available(fixed(engine) + spare)).n_pages > 0


def test_more_than_there_is_names_what_is_left(engine: Engine) -> None:
    free = 100 * MIB
    with pytest.raises(MachineError) as refused:
        plan_run(engine, available(fixed(engine) + free), 1 << 30)
    assert "lower --kv-memory to 100 MiB" in refused.value.fix
    assert plan_run(engine, available(fixed(engine) + free), free).kv_bytes <= free
