"""Settings of an engine chosen from recorded traffic. The command: tests/cli/test_build_traffic.py."""

from pathlib import Path

from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.tune.engine_settings import choose_settings
from millrace.tune.settings import TrafficSettings
from tests.tune.traffic_files import line, written

TINY = BUNDLED / "tiny"


def test_coverage_leaves_out_the_longest(tmp_path: Path) -> None:
    lines = [line(i, 100 if i else 1500, 20, duration=10) for i in range(100)]
    file = written(tmp_path / "t", lines)
    for covers, context, unfit in ((None, 1536, 0), (99.0, 128, 1)):
        traffic = TrafficSettings(traffic=str(file), traffic_covers=covers)
        ((_, settings),) = choose_settings(TINY, traffic, BuildSettings(), has_tune_flag=False)
        assert settings.value("max_context") == context and settings.proposal.n_unfit == unfit
        reason = settings.choices[0].reason
        assert ("1 (1 %) would not fit (--traffic-covers 99)" in reason) == bool(unfit), reason
        assert "what max_tokens they asked for is not known" in reason
