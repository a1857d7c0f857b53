"""What gpuckpt reads and changes in CRIU's small image files.

Field numbers are those of images/*.proto in CRIU (inventory, pstree, fdinfo, regfile, sk-inet,
remap-file-path) and were compared with dumps of CRIU 4.2.1. Only what gpuckpt needs is read;
everything else passes through untouched (see wire.py). All functions raise ImageCorrupt, naming the
file, for anything that is not a whole image file.
"""

from __future__ import annotations

import re
import socket
import struct
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from gpuckpt.images import wire
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator

    Fields = tuple[wire.Field, ...]

INVENTORY, PSTREE, FILES, REMAPS = "inventory.img", "pstree.img", "files.img", "remap-fpath.img"

_INVENTORY_MAGIC = (0x58313116,)
_PSTREE_MAGIC = (wire.COMMON_MAGIC, 0x50273030)
_FILES_MAGIC = (wire.COMMON_MAGIC, 0x56303138)
_REMAPS_MAGIC = (wire.COMMON_MAGIC, 0x59133954)

_REGULAR, _INET = 1, 4
"""enum fd_types in fdinfo.proto."""
_REGULAR_FIELD, _INET_FIELD = 3, 4
"""Where file_entry keeps the entry of a regular file and of an inet socket."""
_LINKED = 0
"""enum remap_type: a hard link was made beside the file. GHOST (1) travels inside the image."""
_LINK_REMAP = re.compile(r"link_remap\.\d+")

_TCP = 6
_CLOSED, _LISTEN = 7, 10
"""The kernel's TCP states (include/net/tcp_states.h), which CRIU stores as they are."""
_ADDRESS_BYTES: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}
_STATE, _SOURCE_PORT, _TARGET_PORT = 6, 7, 8

NetworkLock = Literal["iptables", "nftables", "skip", "unknown"]
_NETWORK_LOCKS: dict[int, NetworkLock] = {0: "iptables", 1: "nftables", 2: "skip"}
_LSMS = {0: "", 1: "selinux", 2: "apparmor"}


@dataclass(frozen=True, slots=True)
class Inventory:
    """What CRIU says about a whole image, from inventory.img."""

    image_version: int
    has_root_ids: bool
    lsm: str
    """'', 'selinux', 'apparmor', or the number of one that is not known here."""
    network_lock: NetworkLock
    tcp_close: bool
    """Dumped with --tcp-close: restore must be told the same."""
    run_id: str
    """CRIU's id of this dump, which stands in the name of its nftables table; '' before CRIU 4.1."""
    plugins: tuple[str, ...]
    """CRIU plugins that took part and must be there at restore."""


@dataclass(frozen=True, slots=True)
class LinkRemap:
    """A name CRIU gave to a file whose own name was gone while the inode still had another one."""

    path: str
    """The hard link CRIU made, absolute: DIRECTORY/link_remap.N. It must exist at restore."""
    original: str
    """The name CRIU links it back to for the moment of opening it."""


@dataclass(frozen=True, slots=True)
class InetSocket:
    """An IPv4 or IPv6 socket of the image."""

    id: int
    """CRIU's id of the open file."""
    inode: int
    """The N of 'socket:[N]' at dump time."""
    family: int
    type: int
    protocol: int
    state: int
    source_port: int
    target_port: int
    source: str
    target: str
    """Addresses as text; '' where the image has none."""

    @property
    def connected(self) -> bool:
        """A TCP connection in any state that has another end."""
        return self.protocol == _TCP and self.state not in (_CLOSED, _LISTEN) and self.target_port != 0


@dataclass(frozen=True, slots=True)
class ImageProcess:
    """One process of the image."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]
    """Thread ids, the leader's included."""


@dataclass(frozen=True, slots=True)
class RegularFile:
    """A file of the file system that the tree has open or mapped; sizes are bytes, flags are open(2)'s."""

    id: int
    name: str
    flags: int
    position: int
    size: int | None
    mode: int | None
    """st_mode with its type bits; None where CRIU did not store it."""


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except wire.Malformed as error:
        raise ImageCorrupt(f"{where}: {error}", "copy the image again, or restore another one") from None


def read_inventory(path: str | os.PathLike[str]) -> Inventory:
    """Read an inventory.img."""
    where = str(path)
    image = wire.split(wire.read_image(path), _INVENTORY_MAGIC, where)
    if len(image.messages) != 1:
        raise ImageCorrupt(f"{where}: {len(image.messages)} entries instead of one", "copy the image again")
    with _named(where):
        return _inventory(wire.decode(image.messages[0]))


def _inventory(fields: Fields) -> Inventory:
    lsm = wire.number_of(fields, 6)
    # plugins_entry is a message of its own, so that "no plugin" and "older CRIU" can be told apart.
    plugins = wire.decode(wire.chunk_of(fields, 12) or b"")
    return Inventory(
        image_version=wire.number_of(fields, 1),
        has_root_ids=wire.chunk_of(fields, 3) is not None,
        lsm=_LSMS.get(lsm, str(lsm)),
        network_lock=_NETWORK_LOCKS.get(wire.number_of(fields, 11), "unknown"),
        tcp_close=wire.number_of(fields, 10) != 0,
        run_id=wire.text_of(fields, 13),
        plugins=tuple(wire.text_of((field,), field.number) for field in plugins if field.kind == wire.CHUNK),
    )


def read_process_list(path: str | os.PathLike[str]) -> tuple[ImageProcess, ...]:
    """Read a pstree.img: the processes in CRIU's order, the root first."""
    where = str(path)
    image = wire.split(wire.read_image(path), _PSTREE_MAGIC, where)
    with _named(where):
        return tuple(_process(wire.decode(message)) for message in image.messages)


def _process(fields: Fields) -> ImageProcess:
    pid, ppid, pgid, sid = (wire.number_of(fields, number) for number in (1, 2, 3, 4))
    return ImageProcess(pid, ppid, pgid, sid, wire.numbers_of(fields, 5))


def _entries(files_img: bytes, kind: int, member: int, where: str) -> Iterator[Fields]:
    """The entries of one kind in a files.img."""
    for message in wire.split(files_img, _FILES_MAGIC, where).messages:
        fields = wire.decode(message)
        body = wire.chunk_of(fields, member)
        if wire.number_of(fields, 1) == kind and body is not None:
            yield wire.decode(body)


def list_regular_files(files_img: bytes, where: str = FILES) -> tuple[RegularFile, ...]:
    """The regular files and directories in the bytes of a files.img."""
    with _named(where):
        return tuple(_regular(fields) for fields in _entries(files_img, _REGULAR, _REGULAR_FIELD, where))


def _regular(fields: Fields) -> RegularFile:
    present = {field.number for field in fields}
    return RegularFile(
        id=wire.number_of(fields, 1),
        name=wire.text_of(fields, 6),
        flags=wire.number_of(fields, 2),
        position=wire.number_of(fields, 3),
        size=wire.number_of(fields, 8) if 8 in present else None,
        mode=wire.number_of(fields, 10) if 10 in present else None,
    )


def link_remaps(directory: str | os.PathLike[str]) -> tuple[LinkRemap, ...]:
    """The link_remap files that a restore of this CRIU image directory needs.

    Raises ImageCorrupt also where a path is not absolute or not called link_remap.N: a forged image must
    not get gpuckpt to write elsewhere.
    """
    path = Path(directory) / REMAPS
    try:
        raw = wire.read_image(path)
    except ImageCorrupt:
        if path.is_symlink() or path.exists():
            raise
        return ()  # CRIU takes a missing file for an empty one
    where = str(path)
    image = wire.split(raw, _REMAPS_MAGIC, where)
    with _named(where):
        pairs = [pair for message in image.messages for pair in _linked(wire.decode(message))]
    if not pairs:
        return ()
    files = Path(directory) / FILES
    names = {file.id: file.name for file in list_regular_files(wire.read_image(files), str(files))}
    return tuple(dict.fromkeys(_link_remap(original, remap, names, where) for original, remap in pairs))


def _linked(fields: Fields) -> Iterator[tuple[int, int]]:
    if wire.number_of(fields, 3) == _LINKED:
        yield wire.number_of(fields, 1), wire.number_of(fields, 2)


def _link_remap(original: int, remap: int, names: dict[int, str], where: str) -> LinkRemap:
    if original not in names or remap not in names:
        raise ImageCorrupt(f"{where}: it names a file that files.img lacks", "copy the image again")
    path = PurePosixPath(names[remap])
    for name in (path, PurePosixPath(names[original])):
        if not name.is_absolute() or ".." in name.parts or "\0" in str(name):
            raise ImageCorrupt(f"{where}: the path {str(name)!r} is not allowed", "do not restore this image")
    if not _LINK_REMAP.fullmatch(path.name):
        raise ImageCorrupt(f"{where}: {str(path)!r} is no link_remap file", "do not restore this image")
    return LinkRemap(names[remap], names[original])


def list_inet_sockets(files_img: bytes, where: str = FILES) -> tuple[InetSocket, ...]:
    """The IPv4 and IPv6 sockets in the bytes of a files.img."""
    with _named(where):
        return tuple(_socket(fields) for fields in _entries(files_img, _INET, _INET_FIELD, where))


def _socket(fields: Fields) -> InetSocket:
    family = wire.number_of(fields, 3)
    return InetSocket(
        id=wire.number_of(fields, 1),
        inode=wire.number_of(fields, 2),
        family=family,
        type=wire.number_of(fields, 4),
        protocol=wire.number_of(fields, 5),
        state=wire.number_of(fields, _STATE),
        source_port=wire.number_of(fields, _SOURCE_PORT),
        target_port=wire.number_of(fields, _TARGET_PORT),
        source=_address(family, wire.numbers_of(fields, 11)),
        target=_address(family, wire.numbers_of(fields, 12)),
    )


def _address(family: int, words: tuple[int, ...]) -> str:
    """CRIU stores the address's bytes in memory as u32: network order, read on a little endian host."""
    raw = b"".join(struct.pack("<I", word & 0xFFFFFFFF) for word in words[:4])
    size = _ADDRESS_BYTES.get(family, 0)
    if size == 0 or len(raw) < size:
        return ""
    return socket.inet_ntop(family, raw[:size])


def outside_sockets(files_img: bytes, where: str = FILES) -> tuple[InetSocket, ...]:
    """The TCP connections whose other end is not in the image.

    Both ends of an inner connection are in the image, each the mirror of the other.
    """
    sockets = [entry for entry in list_inet_sockets(files_img, where) if entry.connected]
    ends = {(plain(entry.source), entry.source_port, plain(entry.target), entry.target_port) for entry in sockets}
    return tuple(
        entry
        for entry in sockets
        if (plain(entry.target), entry.target_port, plain(entry.source), entry.source_port) not in ends
    )


def plain(address: str) -> str:
    """One spelling per address: a dual-stack server sees '::ffff:10.0.0.1' where its client has '10.0.0.1'."""
    if not address:
        return ""
    from ipaddress import IPv6Address, ip_address  # noqa: PLC0415  only connections need it

    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def close_sockets(files_img: bytes, inodes: Collection[int], where: str = FILES) -> bytes:
    """The files.img in which the TCP connections with these inodes are closed; the rest is unchanged.

    CRIU then makes a fresh unconnected socket for each, and the program gets EPIPE or ENOTCONN at its
    next use. CRIU's own --tcp-close would close the connections inside the tree as well. The ports
    become 0, or CRIU would bind the old one, which belongs to a listener or to the original.
    Inodes that are not in the image, or no TCP connections, are ignored.
    """
    image = wire.split(files_img, _FILES_MAGIC, where)
    with _named(where):
        messages = tuple(_closed_message(message, inodes) for message in image.messages)
    return wire.join(wire.ImageFile(image.magic, messages))


def _closed_message(message: bytes, inodes: Collection[int]) -> bytes:
    fields = wire.decode(message)
    body = wire.chunk_of(fields, _INET_FIELD)
    if wire.number_of(fields, 1) != _INET or body is None:
        return message
    entry = wire.decode(body)
    found = _socket(entry)
    if found.inode not in inodes or not found.connected:
        return message
    closed = wire.chunk(_INET_FIELD, wire.encode(map(_closing, entry)))
    return wire.encode(closed if field.number == _INET_FIELD else field for field in fields)


def _closing(field: wire.Field) -> wire.Field:
    values = {_STATE: _CLOSED, _SOURCE_PORT: 0, _TARGET_PORT: 0}
    return wire.integer(field.number, values[field.number]) if field.number in values else field
