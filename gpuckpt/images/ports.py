"""A tree that comes back on other ports than it had: its sockets in files.img, both ends of its inner connections.

The program's own idea of its port stays what it was. Ports of connections to outside cannot change: the other
end knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.images import criuformat, wire
from gpuckpt.model.errors import ImageCorrupt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuckpt.images.criuformat import InetSocket

_MAGIC = (wire.COMMON_MAGIC, 0x56303138)
"""files.img."""
_INET, _MEMBER = 4, 4
"""enum fd_types in fdinfo.proto, and where file_entry keeps the entry of an inet socket."""
_INODE, _SOURCE, _TARGET = 2, 7, 8
"""sk-inet.proto."""

LOOPBACK = ("127.", "::1", "::ffff:127.")


def move(files_img: bytes, ports: Mapping[int, int], where: str = criuformat.FILES) -> bytes:
    """The files.img in which sockets of these ports have the others; the rest is unchanged. Raises ImageCorrupt."""
    if not ports:
        return files_img
    edits = _edits(files_img, ports, where)
    image = wire.split(files_img, _MAGIC, where)
    try:
        messages = tuple(_moved(message, edits) for message in image.messages)
    except wire.Malformed as error:
        raise ImageCorrupt(f"{where}: {error}", "copy the image again, or restore another one") from None
    return wire.join(wire.ImageFile(image.magic, messages))


def _edits(files_img: bytes, ports: Mapping[int, int], where: str) -> dict[int, dict[int, int]]:
    """Inode -> field -> port, of the sockets that change."""
    fixed = {one.inode for one in criuformat.outside_sockets(files_img, where)}
    own = [one for one in criuformat.list_inet_sockets(files_img, where) if one.inode not in fixed]
    found: dict[int, dict[int, int]] = {}
    for one in own:
        if one.source_port in ports:
            found.setdefault(one.inode, {})[_SOURCE] = ports[one.source_port]
        if one.target_port in ports and _leads_to(one, own):
            found.setdefault(one.inode, {})[_TARGET] = ports[one.target_port]
    return found


def _leads_to(socket: InetSocket, own: Sequence[InetSocket]) -> bool:
    """Its other end is a socket of the tree: a TCP connection is, or is fixed; a datagram's port can be anybody's."""
    if socket.connected:
        return True
    ends = {one.source for one in own if (one.protocol, one.source_port) == (socket.protocol, socket.target_port)}
    return socket.target in ends or (bool(ends & {"0.0.0.0", "::"}) and socket.target.startswith(LOOPBACK))  # noqa: S104


def _moved(message: bytes, edits: Mapping[int, Mapping[int, int]]) -> bytes:
    fields = wire.decode(message)
    body = wire.chunk_of(fields, _MEMBER)
    if wire.number_of(fields, 1) != _INET or body is None:
        return message
    entry = wire.decode(body)
    edit = edits.get(wire.number_of(entry, _INODE), {})
    if not edit:
        return message
    edited = wire.chunk(_MEMBER, wire.encode(_with_port(field, edit) for field in entry))
    return wire.encode(edited if field.number == _MEMBER else field for field in fields)


def _with_port(field: wire.Field, edit: Mapping[int, int]) -> wire.Field:
    return wire.integer(field.number, edit[field.number]) if field.number in edit else field
