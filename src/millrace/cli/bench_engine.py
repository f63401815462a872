"""`millrace bench --engine`: the load on an engine in this process."""

from millrace.bench.in_process import EngineClient
from millrace.bench.plan import Plan, driven_by
from millrace.bench.run import Run
from millrace.bench.words import Words
from millrace.cli.bench_runner import Begins, driven
from millrace.cli.models import opened
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.runtime.open import RunSettings


def in_process(engine: str, plan: Plan, env: Env, quiet: bool) -> Run:
    """The protocol of published tables: no HTTP, no template, random tokens, exact lengths."""
    with opened(engine, BuildSettings(), RunSettings(), env, quiet=quiet) as model:

        async def work(begins: Begins) -> Run:
            async with EngineClient(model.loop(), plan.load.seed) as client:
                return await driven_by(client, plan, plan.sessions(Words()), begins)

        return driven(work, quiet)
