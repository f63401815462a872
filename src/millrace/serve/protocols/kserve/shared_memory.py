"""Triton's system shared memory: regions that clients register, from which inputs are read and to which outputs go.

A client may truncate its file at any time, and reading it through a mapping would kill the process. So regions are read
and written through the file: one copy, and a short read is an error of that request alone.
"""

import os
import re
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.serve.protocols.kserve.request_fields import SHARED_OFF

_FOLDER = Path("/dev/shm")  # where shm_open creates its files
_KEY = re.compile(r"/?[^/\0]{1,254}")
_RESERVED = "triton_python_backend_shm_region_"
_MAX_REGIONS = 1024
_SLOW = 2 << 20  # bytes, which are copied aside
_MAX_TENSORS = 4  # of the largest size, in one request


@dataclass(slots=True, eq=False)
class SharedMemoryRegion:
    """A registered region: `byte_size` bytes of the file `key` from `offset` on; `fd` is the open file.

    n_places: places of open requests in it; is_leaving: it is closed with the last of them
    """

    name: str
    tenant: str
    key: str
    offset: int
    byte_size: int
    fd: int
    n_places: int = 0
    is_leaving: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RegionPlace:
    """The place of a request's tensor in a region, which stays registered as long as the place exists."""

    region: SharedMemoryRegion
    offset: int  # within the region
    byte_size: int

    def read(self) -> memoryview:
        """Read the tensor. raises StatusError if the file was truncated"""
        data = bytearray(self.byte_size)
        n = os.preadv(self.region.fd, [data], self.region.offset + self.offset)
        if n < self.byte_size:
            raise StatusError(Code.INTERNAL, f"shared memory region '{self.region.name}' has been cut off")
        return memoryview(data)

    def write(self, output: str, data: bytes) -> None:
        """Write an output. raises StatusError"""
        if len(data) > self.byte_size:
            raise StatusError(
                Code.INTERNAL,
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should "
                f"be at least {len(data)} bytes to hold the results",
            )
        os.pwrite(self.region.fd, data, self.region.offset + self.offset)


class SharedMemoryRegions:
    """The regions of one server, by the tenant that registered them and their name.

    max_bytes: of one tensor, as of a body
    """

    def __init__(self, max_bytes: int) -> None:
        self._regions: dict[tuple[str, str], SharedMemoryRegion] = {}
        self._max_bytes, self._largest = max_bytes, 0
        self._lock = threading.RLock()  # places end in any thread, also in one that holds it

    def for_tenant(self, tenant: str) -> "TenantRegions":
        """Return the regions of a tenant: an API key, "" if there are not several."""
        return TenantRegions(self, tenant)

    def register(self, tenant: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """raises StatusError"""
        if (tenant, name) in self._regions:
            raise StatusError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._regions) >= _MAX_REGIONS:
            raise StatusError(Code.UNAVAILABLE, f"{_MAX_REGIONS} shared memory regions are registered, and no more may")
        what = f"cannot register shared memory region '{name}'"
        if _RESERVED in key:
            raise invalid(f"{what} with key '{key}' as the key contains the reserved prefix '{_RESERVED}'")
        if not key:
            raise StatusError(Code.INTERNAL, "Unable to open shared memory region: ''")
        if not _KEY.fullmatch(key) or key.lstrip("/") in (".", ".."):
            raise invalid(f"{what} - invalid shm key '{key}'")
        fd = _open(key)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise invalid(f"{what} - invalid shm key '{key}'")
            if offset + byte_size > info.st_size:
                raise invalid(
                    f"failed to register shared memory region '{name}': invalid args: offset {offset} and byte size "
                    f"{byte_size} reach beyond the {info.st_size} bytes of '{key}'"
                )
        except StatusError:
            os.close(fd)
            raise
        with self._lock:
            self._regions[tenant, name] = SharedMemoryRegion(name, tenant, key, offset, byte_size, fd)
            self._largest = max(self._largest, byte_size)

    def unregister(self, tenant: str, name: str) -> None:
        """Unregister a region, or all of a tenant's (name: ""). One in use goes when no request uses it any more."""
        with self._lock:
            for region in self._regions_of(tenant):
                if name in ("", region.name):
                    region.is_leaving = True
                    self._release_if_unused(region)

    def _regions_of(self, tenant: str) -> list[SharedMemoryRegion]:
        return [region for region in self._regions.values() if region.tenant == tenant]

    def _release_if_unused(self, region: SharedMemoryRegion) -> None:
        """Close a region that is leaving and not in use."""
        if region.is_leaving and not region.n_places:
            del self._regions[region.tenant, region.name]
            os.close(region.fd)
            self._largest = max((other.byte_size for other in self._regions.values()), default=0)

    def _end_place(self, region: SharedMemoryRegion) -> None:
        """End a place in a region."""
        with self._lock:
            region.n_places -= 1
            self._release_if_unused(region)

    def status(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """Describe a region, or all of a tenant's (name: ""). raises StatusError"""
        regions = [region.to_dict() for region in self._regions_of(tenant) if name in ("", region.name)]
        if name and not regions:
            raise StatusError(Code.NOT_FOUND, f"Unable to find system shared memory region: '{name}'")
        return regions

    def place(self, tenant: str, name: str, offset: int, byte_size: int) -> RegionPlace:
        """raises StatusError"""
        region = self._regions.get((tenant, name))
        if region is None:
            raise StatusError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        if not 0 <= offset < region.byte_size and (offset or byte_size):
            raise invalid(f"Invalid offset for shared memory region: '{name}'")
        if byte_size < 1 << 64 <= offset + byte_size:
            what = f"byte_size ({byte_size}) + offset ({offset}) for region '{name}' is 2**64 or more"
            raise invalid(f"Integer overflow detected: {what}, expected at most the {region.byte_size} of the region")
        if not 0 <= byte_size <= region.byte_size - offset:
            raise invalid(f"Invalid offset + byte size for shared memory region: '{name}'")
        if byte_size > self._max_bytes:
            raise invalid(
                f"shared memory byte size ({byte_size} bytes) exceeds the maximum allowed value of {self._max_bytes} "
                "bytes. Use --http-max-input-size to increase the limit."
            )
        place = RegionPlace(region, offset, byte_size)
        with self._lock:
            if self._regions.get((tenant, name)) is not region:
                raise StatusError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
            region.n_places += 1
        weakref.finalize(place, self._end_place, region).atexit = False
        return place

    @property
    def slow_bytes(self) -> int:
        """Return the cost of reading from the largest region, in bytes of a body."""
        return min(self._largest, _SLOW)

    def check_total(self, n_bytes: int) -> None:
        """Check the bytes of all inputs of a request. raises StatusError"""
        limit = _MAX_TENSORS * self._max_bytes
        if n_bytes > limit:
            raise invalid(
                f"the inputs of the request have {n_bytes} bytes or more in shared memory, which exceeds the maximum "
                f"of {limit} bytes. Use --http-max-input-size to increase the limit."
            )

    def close(self) -> None:
        for tenant in {region.tenant for region in self._regions.values()}:
            self.unregister(tenant, "")


@dataclass(frozen=True, slots=True)
class TenantRegions:
    """The regions that one tenant registered; it sees no others. The methods are those of `SharedMemoryRegions`."""

    _all: SharedMemoryRegions
    _tenant: str

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self._all.register(self._tenant, name, key, offset, byte_size)

    def unregister(self, name: str) -> None:
        self._all.unregister(self._tenant, name)

    def status(self, name: str) -> list[dict[str, Any]]:
        return self._all.status(self._tenant, name)

    def place(self, name: str, offset: int, byte_size: int) -> RegionPlace:
        return self._all.place(self._tenant, name, offset, byte_size)

    def check_total(self, n_bytes: int) -> None:
        self._all.check_total(n_bytes)


def regions_of_tenant(regions: SharedMemoryRegions | None, tenant: str) -> TenantRegions | None:
    """Return a tenant's regions; None if shared memory is disabled."""
    return None if regions is None else regions.for_tenant(tenant)


def require_shared_memory(regions: TenantRegions | None) -> TenantRegions:
    """Return the regions. raises StatusError if they are None, because shared memory is disabled"""
    if regions is None:
        raise StatusError(Code.UNSUPPORTED, SHARED_OFF)
    return regions


def _open(key: str) -> int:
    """Open a file as shm_open does. raises StatusError"""
    try:
        return os.open(_FOLDER / key.removeprefix("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        raise StatusError(Code.INTERNAL, f"Unable to open shared memory region: '{key}'") from None
