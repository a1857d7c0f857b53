"""inspect --extract: an image as a plain CRIU directory, and the commands that bring it up without gpuckpt."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING

from gpuckpt.flows import verifying
from gpuckpt.flows.leandir import PackedMemory, is_packed
from gpuckpt.flows.unsealing import LOG
from gpuckpt.images import lean
from gpuckpt.model.errors import NotFound, Refused
from gpuckpt.model.manifest import OPEN
from gpuckpt.system import criu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.unsealing import View
    from gpuckpt.model.manifest import Manifest
    from gpuckpt.stores.directory import Image


def extract(view: View, target: Path, interruption: Interruption) -> list[str]:
    """Write the directory `target` with every byte verified; returns the shell commands that restore from it.

    Raises Refused when it exists, NotFound without a parent directory, ImageCorrupt, OSError, BrokenOff;
    what was written until then is removed.
    """
    if os.path.lexists(target):
        raise Refused(f"{target} exists already", "choose another name, or remove it")
    if not target.parent.is_dir():
        raise NotFound(f"{target.parent}: no such directory", "make it first")
    verifying.verify_small_files(view.stored, interruption)
    image = view.image
    target.mkdir(mode=0o700)
    try:
        _copy(image, target)
        if view.place is not None:
            _copy_sealed(image, target)
        if is_packed(image):
            _unpack(view, target, interruption)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return list(_commands(view, target))


def _copy(image: Image, target: Path) -> None:
    for part in image.manifest.parts:
        folder, _, name = part.path.partition("/")
        if folder == "criu" and "/" not in name:
            shutil.copyfile(image.part(part.path), target / name)
            (target / name).chmod(0o600)


def _copy_sealed(image: Image, target: Path) -> None:
    """Of an encrypted image: captured files and CRIU's log, which nobody can read where they lie."""
    names = [part.path for part in image.manifest.parts if part.path.startswith("files/")]
    for name in (*names, *([LOG] if image.part(LOG).exists() else [])):
        (target / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(image.part(name), target / name)
        (target / name).chmod(0o600)


def _unpack(view: View, target: Path, interruption: Interruption) -> None:
    packed = PackedMemory(view.image, view.open_packs)
    try:
        files = lean.pages_files(packed.index.files, None)
        lean.write(target, files, packed.reader, interruption.check)
    finally:
        packed.close()


def _commands(view: View, target: Path) -> Iterator[str]:
    """What a person types, in order; every word quoted."""
    manifest = view.image.manifest
    # Of an encrypted image they were extracted, too: nobody else can read them there.
    files = view.image.path if view.place is None else target
    for one in manifest.captured:
        install = ["install", "-m", f"{one.mode:o}", "-o", str(one.uid), "-g", str(one.gid)]
        made = shlex.join([*install, str(files / one.part), one.path])
        if one.reason == OPEN and one.linked_to:  # a further name of a file that stands by then
            made = shlex.join(["ln", one.linked_to, one.path])
        # A file that the job had open may be a newer one here: that is for a person to decide.
        yield f"test -e {shlex.quote(one.path)} || {made}" if one.reason == OPEN else made
    inherited = [(one.fd, one.key) for one in manifest.tree.outside_stdio if one.kind != "tty"]
    yield shlex.join(criu.by_hand_argv("criu", target, manifest.criu, inherited=inherited))
    yield from _resume(manifest)


def _resume(manifest: Manifest) -> Iterator[str]:
    """A tree that was suspended comes up stopped and without its GPU memory."""
    if not manifest.handed_over_stopped:
        return
    stopped = set(manifest.stopped)
    yield shlex.join(["kill", "-CONT", *(str(one.pid) for one in manifest.tree.ids if one not in stopped)])
    for action in ("restore", "unlock"):
        for member in manifest.cuda:
            yield shlex.join(["cuda-checkpoint", "--action", action, "--pid", str(member.id.pid)])
