"""Settings of `millrace build --traffic`."""

from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.settings import Settings, setting

PARTS = ("all", "day", "night", "both")


@dataclass(frozen=True, kw_only=True)
class TrafficSettings(Settings):
    """The traffic to build an engine for."""

    traffic: str | None = setting(
        None,
        "a recording of `millrace serve --record`, or a trace with lengths: it determines context, batch, KV memory "
        "and the timed row counts, unless flags do",
        metavar="FILE",
    )
    traffic_covers: float | None = setting(
        None, "percent of recorded requests that must fit into the context; default: 100", low=50, high=100
    )
    traffic_part: str | None = setting(
        None,
        "part of a recording whose days and nights differ; both builds two engines; default: all",
        choices=PARTS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("traffic_covers", "traffic_part"):
            if self.traffic is None and getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is given without --traffic", "the recording that is meant", "name it")
