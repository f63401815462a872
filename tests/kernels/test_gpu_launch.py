"""Kernels that begin before those before them have ended: the rule that keeps what they compute right."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from benchmarks.gpu_kernels import _overlaps  # noqa: E402 (Triton's)
from millrace.kernels import gpu_launch  # noqa: E402 (Triton's)

SOURCES = sorted(Path(gpu_launch.__file__).parent.glob("*/*.py"))
CONSTANTS = {
    "w",
    "w_row",
    "PREFETCH",
    "N",
    "K",
    "BLOCK_N",
    "GROUPS",
    "WIDTH",
    "PDL",
}  # asked for before the wait: weights, by their sizes
TOUCHES = {"load", "store", "atomic_add", "atomic_max", "atomic_cas", "make_block_ptr", "make_tensor_descriptor"}


def jitted() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d).startswith("triton.jit") for d in node.decorator_list
            ):
                yield f"{path.parent.name}/{path.name}::{node.name}", node


def calls(node: ast.AST) -> list[str]:
    """By their last names, as they stand in the source."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [ast.unparse(c.func).split(".")[-1] for c in sorted(found, key=lambda c: (c.lineno, c.col_offset))]


def touching() -> set[str]:
    """Functions of ours that touch memory, by themselves or through others."""
    bodies = {node.name: set(calls(node)) for _, node in jitted()}
    found = {name for name, called in bodies.items() if called & TOUCHES}
    while more := {name for name, called in bodies.items() if called & found} - found:
        found |= more
    return found


def overlaps(node: ast.FunctionDef) -> bool:
    return "PDL" in [a.arg for a in node.args.args]


def broken(node: ast.FunctionDef, touches: set[str]) -> str:
    """What of the rule a kernel breaks; "" where nothing."""
    top = [s for s in node.body if ast.unparse(s) == "after_those_before(PDL)"]
    if len(top) != 1:
        return "waits once, in every program, by a line of its own"
    before = [s for s in node.body if s.lineno < top[0].lineno]
    asking = [s for s in before if "asks_for" in calls(s)]
    asked = {n.id for s in asking for n in ast.walk(s) if isinstance(n, ast.Name)}
    if wrong := asked & {a.arg for a in node.args.args} - CONSTANTS:
        return f"asks early for what may not be constant: {', '.join(sorted(wrong))}"
    found = touches & {name for s in before for name in calls(s)}
    return f"touches memory before it waits: {', '.join(found)}" if found else ""


def test_kernels_wait_before_they_touch_what_others_do() -> None:
    touches = touching() | TOUCHES
    found = {name: broken(node, touches) for name, node in jitted() if overlaps(node)}
    assert not any(found.values()), found


def test_only_kernels_that_wait_are_launched_to_overlap() -> None:
    """Each launch with `overlapping` is of a kernel that has a PDL, and no launch asks for it in another way."""
    waiting = {node.name for _, node in jitted() if overlaps(node)}
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            assert "launch_pdl" not in [k.arg for k in call.keywords], path
            if any(k.arg is None and "overlapping(" in ast.unparse(k.value) for k in call.keywords):
                assert isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) in waiting, path


@pytest.mark.parametrize(("source", "wrong"), [
    ("after_those_before(PDL)\n y = tl.load(x)", ""),
    ("lets_next_begin(PDL)\n asks_for(w, 0, 9, 9, 16, 1024, PDL)\n after_those_before(PDL)\n tl.store(x, 1)", ""),
    ("asks_for(x, 0, 9, 9, 16, 1024, PDL)\n after_those_before(PDL)", "constant: x"),
    ("y = tl.load(x)\n after_those_before(PDL)", "load"), ("y = _sum(x)\n after_those_before(PDL)", "_sum"),
    ("if x:\n  after_those_before(PDL)\n y = tl.load(x)", "every program"), ("tl.store(x, 1)", "every program"),
])  # fmt: skip
def test_the_rule_is_seen_to_be_broken(source: str, wrong: str) -> None:
    node = ast.parse(f"def kernel(x, w, PDL):\n {source}").body[0]
    assert isinstance(node, ast.FunctionDef)
    found = broken(node, {"load", "store", "_sum"})
    assert wrong in found if wrong else not found


def test_only_from_hopper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never on a CPU, never in the interpreter; there a switch to measure without."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (8, 9), (10, 0)][device.index])
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(3))]

    def found() -> list[bool]:
        gpu_launch._may_overlap.cache_clear()
        options = [gpu_launch.overlapping(device) for device in devices]
        assert all(o["PDL"] == o["launch_pdl"] and len(o) == 2 for o in options)
        return [o["PDL"] for o in options]

    assert found() == [False] * 4, "these tests run in the interpreter"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert found() == [False, True, False, True]
    monkeypatch.setattr(gpu_launch, "OVERLAP", False)
    assert found() == [False] * 4
    gpu_launch._may_overlap.cache_clear()


@pytest.mark.parametrize(("early", "wrong"), [
    ("ld.param.b64 %rd1, [k_param_0];", False), ("@p cp.async.bulk.prefetch.L2.global [%rd1], 256;", False),
    ("st.shared.b32 [%r1], %r2;", False), ("ld.global.v4.b32 {%r1}, [%rd1];", True), ("ld.b32 %r1, [%rd1];", True),
    ("st.global.b32 [%rd1], %r1;", True), ("cp.async.cg.shared.global [%r1], [%rd1], 16;", True),
    ("cp.async.bulk.shared::cluster.global [%r1], [%rd1], 16, [%r2];", True),
    ("atom.global.add.u32 %r1, [%rd1], 1;", True),
])  # fmt: skip
def test_what_a_kernel_compiles_to_is_looked_at(early: str, wrong: bool) -> None:
    """Anything but parameters, shared memory and what is asked for ahead is too early before the wait."""
    ptx = f"griddepcontrol.launch_dependents;\n{early}\ngriddepcontrol.wait;\nld.global.b32 %r1, [%rd1];"
    if wrong:
        with pytest.raises(AssertionError, match=r"\w"):
            _overlaps(ptx)
    else:
        assert _overlaps(ptx)
    assert not _overlaps(early), "it does not wait, and begins when those before it have ended"
