"""What happens inside: the result of any module can be handed out beside the answer, and keeping it changes no answer.

python examples/layer_outputs.py
"""

import tempfile
from pathlib import Path

import numpy as np

from millrace import SamplingParams
from millrace.api.offline_generate import generate
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.runtime.loop import EngineLoop

LAYERS = tuple(f"model.layers.{i}" for i in range(4))


def main(prompt: str = "Once upon a time") -> dict[str, np.ndarray]:
    source = Source.from_checkpoint(Checkpoint.open(BUNDLED / "tiny"))
    plan = plan_engine(source, BuildOptions(keep=LAYERS))
    with tempfile.TemporaryDirectory() as folder:
        write_engine(source, plan, Path(folder) / "tiny", name="tiny")
        engine = Engine.open(Path(folder) / "tiny")
        tokenizer, executor = open_tokenizer(engine.folder), engine.executor(n_pages=16)
    (output,) = generate(EngineLoop(executor, tokenizer), [prompt], SamplingParams(max_tokens=1, temperature=0))
    kept = {name: executor.output(name) for name in LAYERS}  # of the last step: (its tokens, hidden size)
    executor.close()
    print(f"{prompt!r} goes on with {output.outputs[0].text!r}")
    for name, states in kept.items():
        print(f"  {name}: {states.shape[0]} tokens, root mean square {np.sqrt((states**2).mean()):.3f}")
    return kept


if __name__ == "__main__":
    main()
