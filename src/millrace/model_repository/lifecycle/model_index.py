"""Index of all models of the repositories: served versions, and the state of every version that was tried."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from millrace.model_repository.lifecycle.load_override import LoadOverride
from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.model_names import ModelId, resolve_step
from millrace.model_repository.repository.repository_reader import ModelFolder as FoundModel
from millrace.model_repository.request.status_code import Code, StatusError, invalid


class ReadyState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"  # Triton's reason for a requested unload
_REQUESTED_STATES = ((ReadyState.UNLOADING, ""), (ReadyState.UNAVAILABLE, UNLOADED))


@dataclass(slots=True)
class ModelEntry:
    """One model. models: served versions. states: state and reason of every version that was ever tried"""

    models: dict[int, Model] = field(default_factory=dict)
    states: dict[int, tuple[ReadyState, str]] = field(default_factory=dict)
    stamp: object = None  # of its files when they were read
    read: FoundModel | None = None  # the model as read then, if served
    # For an ensemble that is not loaded: its members, and the overrides of its load request.
    pending_members: frozenset[str] = frozenset()
    override: LoadOverride = field(default_factory=LoadOverride)
    owner: str = ""  # API key that loaded it, if there are several keys
    unload_requested: bool = False  # the model, or a member of it, was unloaded on request
    # While loading: the models that its members' names resolve to, some of which are not tried yet.
    loading: dict[str, ModelId] = field(default_factory=dict)

    @property
    def unready_reasons(self) -> list[str]:
        """Why versions are not, or only partly, ready, except those unloaded on request."""
        reasons = []
        for version, (state, reason) in sorted(self.states.items()):
            model = self.models.get(version)
            if state is not ReadyState.READY and not self.unload_requested and (state, reason) not in _REQUESTED_STATES:
                reasons.append(f"version {version} is at {state.value} state" + (f": {reason}" if reason else ""))
            elif model is not None and model.unready_reason:
                reasons.append(f"version {version}: {model.unready_reason}")
        return reasons

    @property
    def failed(self) -> list[int]:
        """Versions that failed: not served, and not unloaded on request."""
        return [
            version for version, (state, reason) in sorted(self.states.items())
            if state is ReadyState.UNAVAILABLE and reason != UNLOADED and not self.unload_requested
        ]  # fmt: skip

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is served or should be."""
        return not self.models and all(state in _REQUESTED_STATES for state in self.states.values())

    @property
    def highest(self) -> Model:
        """The highest served version."""
        return self.models[max(self.models)]

    @property
    def ensembles(self) -> list[Ensemble]:
        return [model for model in self.models.values() if isinstance(model, Ensemble)]

    @property
    def members(self) -> frozenset[str]:
        """Member names of the ensemble that it is or will be."""
        return self.pending_members.union(*(ensemble.members for ensemble in self.ensembles))


class ModelIndex:
    """Entries of every model that was ever tried. Lookups by name are fast, because each request needs one."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, ModelEntry]] = {}  # by name, then by namespace
        # By member name: ensembles ever loaded with that member, possibly outdated. Avoids scanning all at start.
        self._ensembles_by_member: dict[str, set[ModelId]] = {}

    def get(self, model_id: ModelId) -> ModelEntry | None:
        return self._by_name.get(model_id.name, {}).get(model_id.namespace)

    def __getitem__(self, model_id: ModelId) -> ModelEntry:
        return self._by_name[model_id.name][model_id.namespace]

    def get_or_create(self, model_id: ModelId) -> ModelEntry:
        """Return the entry of a model, created if missing."""
        return self._by_name.setdefault(model_id.name, {}).setdefault(model_id.namespace, ModelEntry())

    def find_by_name(self, name: str) -> list[ModelId]:
        return [ModelId(namespace, name) for namespace in sorted(self._by_name.get(name, ()))]

    def present(self, name: str) -> list[ModelId]:
        """Return models of that name that are served or should be, without those unloaded on request."""
        return [model_id for model_id in self.find_by_name(name) if not self[model_id].is_gone]

    def find(self, name: str) -> ModelEntry | None:
        """Return the entry of a name. raises StatusError if the name is ambiguous"""
        entries = self._by_name.get(name)
        if entries is None:
            return None
        if len(entries) > 1:
            present_versions = self.present(name)
            if len(present_versions) > 1:
                message = f"There are {len(present_versions)} identifiers of model '{name}' in global map"
                raise invalid(f"{message}, model namespace must be provided to resolve ambiguity.")
            if present_versions:
                return self[present_versions[0]]
        return next(iter(entries.values()))

    def find_step(self, model_id: ModelId) -> ModelEntry | None:
        """Return the entry that a step refers to. model_id: with the ensemble's namespace. raises as `find` does"""
        own = self.get(model_id)
        return own if own is not None and not own.is_gone else self.find(model_id.name)

    def resolve(self, model_id: ModelId) -> ModelId | None:
        """Return the model that a step refers to; None if there is none or several."""
        return resolve_step(model_id, self.present(model_id.name))

    # ------------------------------------------------------------------ ensembles, and what they are made of

    def member(self, ensemble: ModelId, name: str) -> ModelId:
        """Return an ensemble's member of that name; if unresolved, the one in its own namespace."""
        entry, neighbour = self.get(ensemble), ModelId(ensemble.namespace, name)
        loading = entry.loading.get(name) if entry is not None else None
        return loading or self.resolve(neighbour) or neighbour

    def begin_ensemble_load(self, model_id: ModelId, members: Mapping[str, ModelId], override: LoadOverride) -> None:
        """Record the members of an ensemble that starts loading. members: by step name"""
        entry = self[model_id]
        entry.pending_members, entry.override, entry.loading = frozenset(members), override, dict(members)
        for name in members:
            self._ensembles_by_member.setdefault(name, set()).add(model_id)

    def _ensembles_naming(self, name: str) -> list[ModelId]:
        """Return the ensembles with a step of that name, in order."""
        ensembles = (model_id for model_id in self._ensembles_by_member.get(name, ()) if name in self[model_id].members)
        return sorted(ensembles, key=lambda model_id: (model_id.name, model_id.namespace))

    def ensembles_of(self, model_id: ModelId) -> list[ModelId]:
        """Return the ensembles that contain the model."""
        return [
            other for other in self._ensembles_naming(model_id.name) if self.member(other, model_id.name) == model_id
        ]

    def affected(self, model_id: ModelId) -> list[ModelId]:
        """Return the ensembles for which a new model resolves a step, or makes it ambiguous."""
        return [
            other
            for other in self._ensembles_naming(model_id.name)
            if self.resolve(ModelId(other.namespace, model_id.name)) in (model_id, None)
        ]

    def check_ring(self, model_id: ModelId, members: Iterable[ModelId]) -> None:
        """Check that no member depends on the ensemble itself. raises StatusError"""
        visited, left = set[ModelId](), [(member, model_id) for member in members]
        while left:
            member, needed_by = left.pop()
            if member == model_id:
                raise invalid(f"circular dependency between ensembles: {model_id} -> ... -> {needed_by} -> {model_id}")
            entry = self.get(member)
            if entry is not None and member not in visited:
                visited.add(member)
                left.extend((self.member(member, name), member) for name in entry.members)

    # ------------------------------------------------------------------ all of them

    def items(self) -> list[tuple[ModelId, ModelEntry]]:
        """Return all entries in order."""
        return [(model_id, self[model_id]) for name in sorted(self._by_name) for model_id in self.find_by_name(name)]

    def failed(self) -> Iterator[tuple[ModelId, int]]:
        """Yield versions that should be served but failed to load."""
        for model_id, entry in self.items():
            yield from ((model_id, version) for version in entry.failed)

    def check_owner(self, name: str, owner: str) -> None:
        """Check that the API key may change models of a name: only its own; "" is an admin. raises StatusError"""
        for model_id in self.find_by_name(name) if owner else ():
            entry = self[model_id]
            if entry.models and entry.owner != owner:
                whose = "with another API key" if entry.owner else "by the server's operator"
                message = f"model '{name}' was loaded {whose}, so that this API key cannot change it"
                raise invalid(f"{message}: a key with role=admin can")

    def clear(self) -> None:
        self._by_name.clear()
        self._ensembles_by_member.clear()


def version_of(entry: ModelEntry | None, name: str, version: int | None) -> Model:
    """Return a served version; None: the highest. raises StatusError"""
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


def _unknown(detail: str, code: Code = Code.NOT_FOUND) -> StatusError:
    return StatusError(code, f"Request for unknown model: {detail}")
