"""Models with several cache groups from a checkpoint to the answer, with tensors of this CPU in place of a GPU's."""

from pathlib import Path
from typing import Any

import pytest

from millrace import LLM, SamplingParams
from millrace.compile import resolve_model
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.cuda.executor import CudaExecutor
from millrace.runtime.open_engine import RunningModel
from tests.e2e.test_on_gpu import HERE
from tests.support.checkpoints import random_checkpoint

SMALL: dict[str, Any] = {"max_batch": 3, "max_context": 512, "device": "cuda", "prefix_cache": True}
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 132, "num_attention_heads": 2}


def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned is what is used; the prompt is many windows long."""
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)
    folder = random_checkpoint(tmp_path / "gemma2", "gemma2", seed=5, **SIZES)
    with LLM(str(folder), **SMALL) as llm:
        assert isinstance(llm._opened, RunningModel) and isinstance(llm._opened.executor, CudaExecutor)
        engine, plan, executor = llm._opened.engine, llm._opened.plan, llm._opened.executor
        assert isinstance(engine, GpuEngine) and engine.windows == (33,)
        assert [w.n_pages for w in executor.limits.windows] == list(plan.window_pages)
        kept = sum(x.nbytes for p in executor._pages.values() for x in (p.keys, p.values))
        assert kept == plan.kv_bytes + engine.page_bytes and plan.full_sequences(engine) == 3
        params = SamplingParams(max_tokens=4, temperature=0)
        first, again = (llm.generate([{"prompt_token_ids": list(range(3, 300))}], params)[0] for _ in range(2))
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert again.num_cached_tokens and again.num_cached_tokens >= 64


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is asked again goes on from a known state."""
    monkeypatch.setattr(resolve_model, "find_gpu", lambda device: HERE)
    folder = random_checkpoint(tmp_path / "lfm2", "lfm2", seed=5, **SIZES)
    with LLM(str(folder), **SMALL) as llm:
        assert isinstance(llm._opened, RunningModel) and isinstance(llm._opened.executor, CudaExecutor)
        assert llm._opened.executor.limits.n_slots == llm._opened.plan.n_slots == 12
        params = SamplingParams(max_tokens=4, temperature=0)
        first, again = (llm.generate([{"prompt_token_ids": list(range(3, 200))}], params)[0] for _ in range(2))
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert again.num_cached_tokens and again.num_cached_tokens >= 64
