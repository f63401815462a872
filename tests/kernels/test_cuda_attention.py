"""Attention over pages in Triton's interpreter, beside the reference: drawn steps, and what is hard about numbers."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.engine.cuda.attention_partition import AttentionKind, SmGeometry
from millrace.engine.cuda.cuda_graphs import Bucket
from millrace.engine.cuda.step_tables import step_tables
from millrace.engine.executor import StepInputs, plain_rows
from millrace.kernels import torch_reference
from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.attention.ref import attention
from tests.support.one_step import i32

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")

PAGE, CPU = 64, torch.device("cpu")
KEPT = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8,
        "fp8": torch.float8_e4m3fn}  # fmt: skip
# Of the sum of weights times magnitudes: what rounds the weights, and the result (the interpreter cuts bfloat16 off).
APART = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}


@dataclass
class Drawn:
    """Sequences of random contexts, their keys and values in pages; all that no token wrote is no number."""

    step: StepInputs
    pages: LayerPages
    q: Tensor

    @classmethod
    def of(
        cls, seed: int, counts: list[tuple[int, int]], shape: tuple[int, int, int, int], kept: str, dtype: torch.dtype
    ) -> "Drawn":
        """counts: tokens before the step, and of it; shape: H, K, D, DV."""
        rng, (H, K, D, DV) = np.random.default_rng(seed), shape
        n_pages = [-(-(first + n) // PAGE) for first, n in counts]
        starts = np.cumsum([0, *(n for _, n in counts)])
        total = sum(n_pages) + 2
        step = StepInputs(
            i32(range(starts[-1])), i32([first + i for first, n in counts for i in range(n)]), i32(starts),
            i32(rng.permutation(total)[: sum(n_pages)]), i32(np.cumsum([0, *n_pages])), plain_rows(1), i32([]), i32([]),
            np.zeros(0, np.float32),
        )  # fmt: skip
        pages = LayerPages.empty((total, K, PAGE), (D, DV), KEPT[kept], CPU)
        for x in (pages.keys, pages.values):
            if pages.coded:
                x.view(torch.int8).random_(-128, 128, generator=torch.Generator().manual_seed(seed))
            else:
                x.fill_(float("nan"))
        for x in (pages.key_scales, pages.value_scales):
            x.fill_(float("nan"))
        drawn = cls(step, pages, torch.from_numpy(rng.normal(size=(starts[-1], H, D))).to(dtype))
        for s in range(len(counts)):
            for i in range(2):
                size = (drawn.length(s), K, (D, DV)[i])
                drawn.keep(s, i, rng.normal(size=size) * 2.0 ** rng.integers(-9, 10, (size[0], 1, 1)) ** i)
        return drawn

    def length(self, s: int) -> int:
        return int(self.step.positions[self.step.starts[s + 1] - 1]) + 1

    def keep(self, s: int, which: int, x: np.ndarray) -> None:
        """Keys (0) or values (1) of a sequence, (n, K, size)."""
        own, at = self.step.pages[self.step.page_starts[s] :], np.arange(len(x))
        page, place = torch.from_numpy(own[at // PAGE]).long(), torch.from_numpy(at % PAGE)
        rows, scales = ((self.pages.keys, self.pages.key_scales), (self.pages.values, self.pages.value_scales))[which]
        found = torch.from_numpy(x).float()
        if self.pages.coded:
            found, scales[page, :, place] = torch_reference.coded(found, rows.dtype)
        rows[page, :, place] = found.to(rows.dtype)

    def tables(self, processors: SmGeometry) -> StepTables:
        K = self.pages.keys.shape[1]
        return step_tables(self.step, PAGE, CPU, AttentionKind(self.q.shape[1] // K, K), processors)

    def check(self, y: Tensor, scale: float, dtype: torch.dtype) -> None:
        """As near the reference, in float64 over what is kept, as roundings to `dtype` allow."""
        q = self.q.double().numpy()
        for s in range(len(self.step.starts) - 1):
            part = slice(self.step.starts[s], self.step.starts[s + 1])
            own = torch.from_numpy(self.step.pages[self.step.page_starts[s] : self.step.page_starts[s + 1]]).long()
            n, first = self.length(s), int(self.step.positions[part][0])
            k, v = (x.transpose(1, 2).flatten(0, 1)[:n].double().numpy() for x in self.pages.floats(own))
            want, bound = (attention(q[part], k, x, first, scale) for x in (v, np.abs(v)))
            assert (np.abs(y[part].double().numpy() - want) <= APART[dtype] * bound + 1e-6).all(), s


@pytest.mark.parametrize(("kept", "dtype"), [
    ("f32", torch.float32), ("int8", torch.bfloat16), ("int8", torch.float16), ("fp8", torch.bfloat16),
    *(pytest.param(*kinds, marks=pytest.mark.nightly) for kinds in (
        ("f16", torch.float16), ("int8", torch.float32), ("fp8", torch.float32), ("fp8", torch.float16),
    )),
])  # fmt: skip
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 6))])
def test_drawn_steps(kept: str, dtype: torch.dtype, seed: int) -> None:
    """Decode rows beside prompts, groups of 1 to 20, heads of any multiple of 8, contexts that end anywhere, values of
    very different magnitudes; on devices of 1 to 60 multiprocessors, so that blocks have one part or many. The
    interpreter makes no products of bfloat16: of such pages, or of INT8 and many rows."""
    rng = np.random.default_rng(100 + seed)
    few = kept == "int8" and dtype == torch.bfloat16
    group, K = int(rng.choice([1, 3, 4, 7, *([] if few else [20])])), int(rng.integers(1, 4))
    D, DV = (8 * int(rng.integers(1, 10)) for _ in range(2))
    counts = [(int(rng.integers(0, 300)), int(n)) for n in (1, 1, 1 if few else rng.integers(2, 70))]
    drawn = Drawn.of(seed, counts, (group * K, K, D, DV), kept, dtype)
    processors = SmGeometry(int(rng.choice([1, 6, 60])), int(rng.choice([64, 128])))
    scale = float(rng.choice([0.3, -0.3])) / D**0.5
    drawn.check(triton_kernels.attention(drawn.q, drawn.tables(processors), drawn.pages, scale), scale, dtype)


def test_parts_are_seen_to_be_merged() -> None:
    """The same step in one part for each block, in some, and a page each: the draws above have all of these."""
    drawn = Drawn.of(7, [(300, 1), (3, 1), (200, 30)], (3, 1, 16, 24), "fp8", torch.float32)
    found = [drawn.tables(SmGeometry(n)) for n in (1, 3, 90)]
    parts = [[len(work.merges) for work in tables.work] for tables in found]
    assert parts[0] != parts[1] and parts[2] == [2, 1], "blocks of the prompt, then decode rows: one has a page alone"
    for tables in found:
        drawn.check(triton_kernels.attention(drawn.q, tables, drawn.pages, 0.2), 0.2, torch.float32)


@pytest.mark.parametrize("group", [3, 20])
@pytest.mark.parametrize("multiprocessors", [9, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_buckets_work(group: int, multiprocessors: int) -> None:
    """Filled twice, the second time by fewer and shorter sequences: what is left of the first is nobody's."""
    shape = 2 * group, 2, 16, 24
    bucket = Bucket(4, 999, 6, PAGE, CPU, multiprocessors, (AttentionKind(group, 2),))
    tables = bucket.tables(AttentionKind(group, 2))
    for counts in ([(300, 1), (64, 1), (63, 1)], [(5, 1), (130, 1)]):
        drawn = Drawn.of(len(counts), counts, shape, "int8", torch.float32)
        bucket.scratch = len(drawn.pages.keys) - 1
        drawn.pages.key_scales[bucket.scratch, :, 0] = drawn.pages.value_scales[bucket.scratch, :, 0] = 1
        bucket.fill(drawn.step)
        (work,) = tables.work
        assert multiprocessors == 1 or 0 < (work.merges[:, 1] > 0).sum() < len(counts)
        q = torch.cat([drawn.q, torch.zeros((4 - len(counts), *drawn.q.shape[1:]))])
        y = triton_kernels.attention(q, tables, drawn.pages, 0.2)
        drawn.check(y[: len(counts)], 0.2, torch.float32)
        assert y.isfinite().all(), "rows that fill it, too: what draws from them ends"


def test_a_bucket_of_several_kinds() -> None:
    """Each finds its own work: of 80 query heads a KV head two blocks for each sequence, of one one."""
    kinds = AttentionKind(1, 3), AttentionKind(80, 1)
    bucket = Bucket(2, 999, 6, PAGE, CPU, 9, kinds)
    for kind in kinds:
        group, K, _ = kind
        drawn = Drawn.of(5, [(300, 1), (63, 1)], (group * K, K, 16, 24), "f16", torch.float16)
        bucket.fill(drawn.step)
        y = triton_kernels.attention(drawn.q, bucket.tables(kind), drawn.pages, 0.2)
        drawn.check(y, 0.2, torch.float16)


@pytest.mark.parametrize("at", [30, 61, 62, 63, 64])
def test_no_token_sees_the_next(at: int) -> None:
    """A page goes without masks when a block's first token sees all of it, and not when it sees all but one key."""
    drawn = Drawn.of(at, [(at, 40)], (2, 1, 16, 16), "f32", torch.float32)
    drawn.check(triton_kernels.attention(drawn.q, drawn.tables(SmGeometry(1)), drawn.pages, 0.3), 0.3, torch.float32)


@pytest.mark.parametrize("n", [1, 40])
def test_every_code_of_e4m3_is_itself(n: int) -> None:
    """Where few rows meet values, and where many do: of one key the value is the result."""
    drawn = Drawn.of(1, [(0, n)], (1, 1, 8, 256), "fp8", torch.float16)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # no numbers
    own = int(drawn.step.pages[0])
    drawn.pages.values.view(torch.uint8)[own, 0, 0], drawn.pages.value_scales[own, 0, 0] = codes, 0.5
    y = triton_kernels.attention(drawn.q, drawn.tables(SmGeometry(1)), drawn.pages, 1.0)
    assert torch.equal(y[0, 0].float(), codes.view(torch.float8_e4m3fn).float() / 2)


@pytest.mark.parametrize("power", [-90, -30, 0, 30, 90])
@pytest.mark.parametrize("n", [1, 9])
def test_queries_of_any_magnitude(power: int, n: int) -> None:
    """They meet E4M3 as float16, which has no such numbers: rows of one block by powers of two of their own."""
    drawn = Drawn.of(3, [(150, n)], (4, 2, 16, 16), "fp8", torch.bfloat16)
    scale = 2.0**-power
    drawn.q *= 2.0**power
    drawn.q[:, 1] *= 2.0**-12
    drawn.check(
        triton_kernels.attention(drawn.q, drawn.tables(SmGeometry(1)), drawn.pages, scale), scale, drawn.q.dtype
    )


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("kept", ["f16", "int8", "fp8"])
@pytest.mark.parametrize("what", ["q inf", "q nan", "key", "value"])
@pytest.mark.parametrize("n", [1, 30])
def test_what_is_not_finite_shows(kept: str, what: str, n: int) -> None:
    """In the rows that read it, and in no other sequence's, head's or row's."""
    drawn = Drawn.of(4, [(100, n), (70, 1)], (4, 2, 16, 16), kept, torch.bfloat16 if kept == "fp8" else torch.float16)
    pages, own = drawn.pages, int(drawn.step.pages[1])
    if what.startswith("q"):
        drawn.q[0, 1, 3] = float(what[2:])
    else:
        rows, scales = (pages.keys, pages.key_scales) if what == "key" else (pages.values, pages.value_scales)
        if pages.coded:
            scales[own, 0, 5] = float("nan")
        else:
            rows[own, 0, 5, 3] = float("nan")
    with np.errstate(invalid="ignore"):
        y = triton_kernels.attention(drawn.q, drawn.tables(SmGeometry(1)), pages, 0.2)
    wrong = ~y.isfinite().all(2)
    expected = torch.zeros_like(wrong)
    if what.startswith("q"):
        expected[0, 1] = True
    else:
        expected[:n, :2] = True
    assert torch.equal(wrong, expected)
