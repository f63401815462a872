"""The network is transformers' Llama, and a run that was interrupted ends where an uninterrupted one does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tools.tiny.data import Shape, next_batch  # noqa: E402
from tools.tiny.export import export  # noqa: E402
from tools.tiny.model import TinyConfig, TinyLlama, document_mask  # noqa: E402
from tools.tiny.train import Plan, Trainer  # noqa: E402

SMALL = TinyConfig(hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, context=128)
PLAN = Plan(tokens=6 * 128, precision="fp32", warmup_steps=2, short=Shape(2, 64), long=Shape(1, 128, 2))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower with more threads, and much slower where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _trainer(tokenizer: Tokenizer) -> Trainer:
    return Trainer(SMALL, PLAN, tokenizer, torch.device("cpu"))


def test_export_equals_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = TinyLlama(SMALL, seed=1)
    export(model, tokenizer, tmp_path / "model", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, SMALL.vocab, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, reference = model(tokens), theirs(tokens).logits
    assert float((ours - reference).abs().max()) <= 1e-5 * float(reference.abs().max())


def test_an_export_holds_what_a_model_folder_needs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(TinyLlama(SMALL), tokenizer, tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not (tmp_path / "model.part").exists()


def test_packed_documents_do_not_see_each_other() -> None:
    model = TinyLlama(SMALL, seed=2)
    tokens = torch.randint(0, SMALL.vocab, (1, 40), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[0] * 15 + [1] * 25])
    with torch.no_grad():
        packed = model(tokens, document_mask(numbers))[:, 15:]
        alone = model(tokens[:, 15:])
    assert float((packed - alone).abs().max()) <= 1e-4 * float(alone.abs().max())  # RoPE is relative


def test_a_batch_is_a_function_of_its_position(tokenizer: Tokenizer) -> None:
    first, position = next_batch(tokenizer, 7, Shape(3, 96))
    again, _ = next_batch(tokenizer, 7, Shape(3, 96))
    following, _ = next_batch(tokenizer, position, Shape(3, 96))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, following.inputs)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert first.inputs.shape == first.weights.shape == first.documents.shape == (3, 96)


def test_resuming_gives_the_state_of_an_uninterrupted_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = _trainer(tokenizer)
    losses = [whole.step() for _ in range(6)]
    before = _trainer(tokenizer)
    head = [before.step() for _ in range(3)]
    before.save(tmp_path / "checkpoint.pt")
    after = _trainer(tokenizer)
    after.load(tmp_path / "checkpoint.pt")
    tail = [after.step() for _ in range(3)]
    assert head + tail == losses
    assert (after.progress.step, after.progress.position) == (whole.progress.step, whole.progress.position)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, after.model.state_dict()[name]), name
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_schedule_ends_low_and_long(tokenizer: Tokenizer) -> None:
    trainer = _trainer(tokenizer)
    assert trainer.lr_factor() == 0.5
    trainer.progress.step, trainer.progress.tokens = 10, 6 * 128 - 1
    assert trainer.lr_factor() == 0.02
    assert trainer.next_batch().inputs.shape == (1, 128)


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    trainer = _trainer(tokenizer)
    losses = [trainer.step() for _ in range(12)]
    assert losses[-1] < losses[0]


def test_a_plan_has_one_budget() -> None:
    with pytest.raises(ValueError, match="budget"):
        Plan()
    with pytest.raises(ValueError, match="budget"):
        Plan(tokens=1, hours=1.0)
