"""What every door hands to a build. The rooms that measure are imported only where something is measured."""

from typing import TYPE_CHECKING

from millrace.compile.settings import BuildSettings

if TYPE_CHECKING:
    from millrace.compile.accuracy_pricing import Pricer


def pricing(build: BuildSettings) -> "Pricer":
    """raises ConfigError for a calibration file that cannot be used"""
    from millrace.evaluate.calibration import Calibration
    from millrace.tune.precision import PrecisionPricer

    return PrecisionPricer(Calibration.open(build.calibration))
