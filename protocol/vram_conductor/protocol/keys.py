"""Keys, and what they allow (*pure*): the broker's list of public keys, and a key file's content.

A key is a CURVE key pair (ZeroMQ RFC 26, https://rfc.zeromq.org/spec/26/); both halves are written
in Z85 (RFC 32), 40 characters for 32 bytes. The broker knows public halves only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.check import check_name
from vram_conductor.protocol.errors import AlreadyExists, ConductorError, NotFound

Role = Literal["admin", "owner", "observer", "worker"]
"""``admin``: an owner who sees everybody's agents in STATUS. ``owner``: its principal's agents.
``observer``: sees what its principal has, and changes nothing. ``worker``: serves a device, and is
no client."""

ROLES: tuple[Role, ...] = ("admin", "owner", "observer", "worker")

Z85_CHARS = 40
"""Length of half a key pair."""

_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


def _check_half(what: str, half: str) -> None:
    # msgspec adds the place in the file to a ValueError.
    if len(half) != Z85_CHARS or not _Z85.issuperset(half):
        raise ValueError(f"{what} is no key: it has {Z85_CHARS} characters of Z85")


def _check_name(field: str, name: str) -> None:
    try:
        check_name(field, name)
    except ConductorError as error:
        raise ValueError(error.info.message) from None


class Quota(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a principal may have at once; None: no limit but those of everybody.

    Attributes:
        agents: registered agents.
        queued_jobs: jobs that wait.
        vram_bytes: device memory: weights, scratch and pools of its agents, each in whole also
            where others share it, and its leases.
        kv_bytes: KV of its agents' guaranteed contexts, and what its conversations have parked:
            beyond it, that of the longest unused goes.
    """

    agents: int | None = None
    queued_jobs: int | None = None
    vram_bytes: int | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= limits.BYTES_MAX:
                raise ValueError(f"{name} is {value}; it must be 0 to {limits.BYTES_MAX}")

    def tightest(self, other: Quota) -> Quota:
        """The smaller limit of each kind."""
        both: dict[str, Any] = {}
        for name in self.__struct_fields__:
            values = [value for each in (self, other) if (value := getattr(each, name)) is not None]
            both[name] = min(values, default=None)
        return Quota(**both)


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the broker knows it.

    Attributes:
        name: what people call it, unique in the list.
        public: its public half.
        principal: whom it stands for; several keys may stand for one.
        quota: limits of the principal; of several keys' the smallest count.
        devices: a worker's: those that it may serve; none named: any.
        created, revoked: when, for people (RFC 3339); empty: not revoked.
    """

    name: str
    public: str
    principal: str
    role: Role
    quota: Quota = Quota()
    devices: tuple[str, ...] = ()
    created: str = ""
    revoked: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "principal"):
            _check_name(field, getattr(self, field))
        _check_half("public", self.public)
        for device in self.devices:
            _check_name("device", device)
        if self.devices and self.role != "worker":
            raise ValueError(f"devices are for the role worker, this is {self.role}")


class KeyList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys of a broker, revoked ones too; the file ``keys.json``."""

    format: Literal[1] = 1
    keys: list[Key] = []

    def __post_init__(self) -> None:
        for field in ("name", "public"):
            values = [getattr(key, field) for key in self.keys]
            if len(values) != len(set(values)):
                raise ValueError(f"two keys have the same {field}")

    def valid(self) -> dict[str, Key]:
        """The keys that are not revoked, by their public half."""
        return {key.public: key for key in self.keys if not key.revoked}

    def with_key(self, key: Key) -> KeyList:
        """The list with one more; a revoked key of that name makes room.

        Raises:
            AlreadyExists: ``key_exists``.
        """
        known = next((each for each in self.keys if each.name == key.name), None)
        if known is not None and not known.revoked:
            raise AlreadyExists(
                "key_exists",
                f"there is a key {key.name!r} already; choose another name, or revoke it first: "
                f"conductor keys revoke {key.name}",
                key=key.name,
            )
        return KeyList(keys=[*(each for each in self.keys if each.name != key.name), key])

    def without(self, name: str, now: str) -> KeyList:
        """The list with that key revoked; once more changes nothing.

        Raises:
            NotFound: ``no_such_key``.
        """
        if all(key.name != name for key in self.keys):
            raise NotFound(
                "no_such_key", f"there is no key {name!r}; see: conductor keys list", key=name
            )
        return KeyList(
            keys=[
                msgspec.structs.replace(key, revoked=now)
                if key.name == name and not key.revoked
                else key
                for key in self.keys
            ]
        )


class KeyPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both halves of the broker's own key; the file ``broker.key``."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        _check_half("public", self.public)
        _check_half("secret", self.secret)

    def __repr__(self) -> str:
        """Without the secret: it must not get into a log."""
        return f"KeyPair(public={self.public!r})"


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What its owner holds: whoever has this file is that principal.

    Attributes:
        name, principal, role: as the broker knew them when it was made; for people.
        public, secret: the pair.
        broker: the public half of the broker's key, so that nobody else can play the broker.
    """

    name: str
    principal: str
    role: Role
    public: str
    secret: str
    broker: str

    def __post_init__(self) -> None:
        for field in ("public", "secret", "broker"):
            _check_half(field, getattr(self, field))

    def __repr__(self) -> str:
        """Without the secret: it must not get into a log."""
        return f"KeyFile(name={self.name!r}, public={self.public!r})"


def quotas(keys: Mapping[str, Key]) -> dict[str, Quota]:
    """The limits of every principal that has any, from its valid keys."""
    found: dict[str, Quota] = {}
    for key in keys.values():
        found[key.principal] = found.get(key.principal, Quota()).tightest(key.quota)
    return {principal: quota for principal, quota in found.items() if quota != Quota()}
