"""Creates the precision selector of a build; evaluation modules are imported only if something is measured."""

from typing import TYPE_CHECKING

from millrace.compile.settings import BuildSettings

if TYPE_CHECKING:
    from millrace.compile.precision_selection import PrecisionSelector


def precision_selector(build: BuildSettings) -> "PrecisionSelector":
    """Create the precision selector of a build. raises ConfigError for an unusable calibration file"""
    from millrace.evaluate.calibration import Calibration
    from millrace.tune.precision import AccuracySelector

    return AccuracySelector(Calibration.open(build.calibration))
