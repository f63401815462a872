"""What is known of the models of repositories: the versions that are served, and what became of those that are not."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.model_names import ModelId, chosen
from millrace.model_repository.repository.repository_reader import Model as FoundModel
from millrace.model_repository.request.status_code import Code, StatusError, invalid


class State(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"  # the reason of what is gone because somebody wanted it so
_BY_WISH = ((State.UNLOADING, ""), (State.UNAVAILABLE, UNLOADED))


@dataclass(slots=True)
class Entry:
    """models: those that are served, by version. states: of every version that was ever tried, with its reason"""

    models: dict[int, Model] = field(default_factory=dict)
    states: dict[int, tuple[State, str]] = field(default_factory=dict)
    stamp: object = None  # of its files, when they were read
    read: FoundModel | None = None  # as it was found then, of those that are served
    # Of an ensemble that is not loaded yet, or could not be: its members, and what a client brought.
    wanted: frozenset[str] = frozenset()
    given: LoadOverride = field(default_factory=LoadOverride)
    owner: str = ""  # whose API key it was loaded with, where there are several
    is_by_wish: bool = False  # it went because somebody unloaded it, or a model that it is made of
    # Of one that is on its way: what its members' names mean, by the folders, too, of which some are not tried yet.
    loading: dict[str, ModelId] = field(default_factory=dict)

    @property
    def troubles(self) -> list[str]:
        """Of each version that is not ready, or not whole, and not on its way out by wish."""
        found = []
        for version, (state, reason) in sorted(self.states.items()):
            model = self.models.get(version)
            if state is not State.READY and not self.is_by_wish and (state, reason) not in _BY_WISH:
                found.append(f"version {version} is at {state.value} state" + (f": {reason}" if reason else ""))
            elif model is not None and model.unready_reason:
                found.append(f"version {version}: {model.unready_reason}")
        return found

    @property
    def failed(self) -> list[int]:
        """Versions that nobody unloaded, and that are not served."""
        return [
            version for version, (state, reason) in sorted(self.states.items())
            if state is State.UNAVAILABLE and reason != UNLOADED and not self.is_by_wish
        ]  # fmt: skip

    @property
    def is_gone(self) -> bool:
        """Nothing of it is there, or was to be."""
        return not self.models and all(state in _BY_WISH for state in self.states.values())

    @property
    def highest(self) -> Model:
        """Of those that are served."""
        return self.models[max(self.models)]

    @property
    def ensembles(self) -> list[Ensemble]:
        return [model for model in self.models.values() if isinstance(model, Ensemble)]

    @property
    def members(self) -> frozenset[str]:
        """Of the ensemble that it is, or will be."""
        return self.wanted.union(*(ensemble.members for ensemble in self.ensembles))


class Entries:
    """Of every model that was ever tried. A name is looked up with each request, so that it has few steps to go."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, Entry]] = {}  # by name, then by namespace
        # By a member's name those that `need` told of, so that a start looks at each once; they may need it no more.
        self._needing: dict[str, set[ModelId]] = {}

    def get(self, one: ModelId) -> Entry | None:
        return self._by_name.get(one.name, {}).get(one.namespace)

    def __getitem__(self, one: ModelId) -> Entry:
        return self._by_name[one.name][one.namespace]

    def made(self, one: ModelId) -> Entry:
        """A new one where there is none."""
        return self._by_name.setdefault(one.name, {}).setdefault(one.namespace, Entry())

    def named(self, name: str) -> list[ModelId]:
        return [ModelId(namespace, name) for namespace in sorted(self._by_name.get(name, ()))]

    def present(self, name: str) -> list[ModelId]:
        """Those that are served, or were to be; not those that somebody has unloaded."""
        return [one for one in self.named(name) if not self[one].is_gone]

    def find(self, name: str) -> Entry | None:
        """The one of that name. raises StatusError where there are several"""
        entries = self._by_name.get(name)
        if entries is None:
            return None
        if len(entries) > 1:
            there = self.present(name)
            if len(there) > 1:
                what = f"There are {len(there)} identifiers of model '{name}' in global map"
                raise invalid(f"{what}, model namespace must be provided to resolve ambiguity.")
            if there:
                return self[there[0]]
        return next(iter(entries.values()))

    def step(self, wanted: ModelId) -> Entry | None:
        """Of an ensemble, with the ensemble's namespace. raises StatusError as `find` does"""
        beside = self.get(wanted)
        return beside if beside is not None and not beside.is_gone else self.find(wanted.name)

    def meant(self, wanted: ModelId) -> ModelId | None:
        """The same, None where there is none, or more than one."""
        return chosen(wanted, self.present(wanted.name))

    # ------------------------------------------------------------------ ensembles, and what they are made of

    def member(self, of: ModelId, name: str) -> ModelId:
        """Of an ensemble; where there is none, or more than one, that beside it."""
        entry, beside = self.get(of), ModelId(of.namespace, name)
        loading = entry.loading.get(name) if entry is not None else None
        return loading or self.meant(beside) or beside

    def need(self, one: ModelId, members: Mapping[str, ModelId], given: LoadOverride) -> None:
        """An ensemble is about to be loaded. members: by the names that its steps have"""
        entry = self[one]
        entry.wanted, entry.given, entry.loading = frozenset(members), given, dict(members)
        for name in members:
            self._needing.setdefault(name, set()).add(one)

    def _naming(self, name: str) -> list[ModelId]:
        """The ensembles that have a step of that name, in order."""
        found = (one for one in self._needing.get(name, ()) if name in self[one].members)
        return sorted(found, key=lambda one: (one.name, one.namespace))

    def made_of(self, one: ModelId) -> list[ModelId]:
        """The ensembles that need it."""
        return [other for other in self._naming(one.name) if self.member(other, one.name) == one]

    def affected(self, one: ModelId) -> list[ModelId]:
        """The same of one that is new, and those that meant another of its name, and now neither."""
        return [
            other for other in self._naming(one.name) if self.meant(ModelId(other.namespace, one.name)) in (one, None)
        ]

    def check_ring(self, one: ModelId, members: Iterable[ModelId]) -> None:
        """raises StatusError where a member of an ensemble needs it, perhaps by way of others"""
        seen, left = set[ModelId](), [(member, one) for member in members]
        while left:
            member, by = left.pop()
            if member == one:
                raise invalid(f"circular dependency between ensembles: {one} -> ... -> {by} -> {one}")
            entry = self.get(member)
            if entry is not None and member not in seen:
                seen.add(member)
                left.extend((self.member(member, name), member) for name in entry.members)

    # ------------------------------------------------------------------ all of them

    def items(self) -> list[tuple[ModelId, Entry]]:
        """In order."""
        return [(one, self[one]) for name in sorted(self._by_name) for one in self.named(name)]

    def failed(self) -> Iterator[tuple[ModelId, int]]:
        """Versions that were to be served, and could not be loaded."""
        for one, entry in self.items():
            yield from ((one, version) for version in entry.failed)

    def check_owner(self, name: str, owner: str) -> None:
        """Of several API keys, only that which loaded a model may change it; "": an admin's. raises StatusError"""
        for one in self.named(name) if owner else ():
            entry = self[one]
            if entry.models and entry.owner != owner:
                whose = "with another API key" if entry.owner else "by the server's operator"
                what = f"model '{name}' was loaded {whose}, so that this API key cannot change it"
                raise invalid(f"{what}: a key with role=admin can")

    def clear(self) -> None:
        self._by_name.clear()
        self._needing.clear()


def version_of(entry: Entry | None, name: str, version: int | None) -> Model:
    """None: the highest version. raises StatusError"""
    if entry is None:
        raise _unknown(f"'{name}' is not found")
    if version is None:
        if not entry.models:
            raise _unknown(f"'{name}' has no available versions")
        return entry.highest
    if version in entry.models:
        return entry.models[version]
    if version in entry.states:
        raise _unknown(f"'{name}' version {version} is not at ready state", Code.UNAVAILABLE)
    raise _unknown(f"'{name}' version {version} is not found")


def _unknown(what: str, code: Code = Code.NOT_FOUND) -> StatusError:
    return StatusError(code, f"Request for unknown model: {what}")
