"""Creates the accuracy pricer of a build; evaluation modules are imported only if something is measured."""

from typing import TYPE_CHECKING

from millrace.compile.settings import BuildSettings

if TYPE_CHECKING:
    from millrace.compile.accuracy_pricing import Pricer


def pricing(build: BuildSettings) -> "Pricer":
    """Create the pricer of a build. raises ConfigError for an unusable calibration file"""
    from millrace.evaluate.calibration import Calibration
    from millrace.tune.precision import PrecisionPricer

    return PrecisionPricer(Calibration.open(build.calibration))
