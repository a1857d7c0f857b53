"""What of an encrypted image everybody may know who can read its files: the rest of its manifest is sealed.

It says what the image is (when, where, how large, which processes by their numbers), and what moving, keeping and
refusing it needs. Names of programs, files, sockets and variables, arguments and notes are not in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuckpt.model.facts import Surroundings, Tree

if TYPE_CHECKING:
    from gpuckpt.model.facts import Process
    from gpuckpt.model.manifest import Manifest, Part

ENCRYPTED = "encrypted"
"""The required feature."""

SEALED = "manifest.sealed"
"""The whole manifest, which only who has the image key can read."""

OWN = frozenset({SEALED, "key.age"})
"""Parts that only an encrypted image has."""


def is_encrypted(manifest: Manifest) -> bool:
    """Whether this is the open manifest of an encrypted image."""
    return ENCRYPTED in manifest.requires


def redacted(manifest: Manifest, parts: tuple[Part, ...]) -> Manifest:
    """The open manifest: `parts` are those that lie in the image."""
    return replace(
        manifest,
        requires=(*manifest.requires, ENCRYPTED),
        tree=_tree(manifest.tree),
        criu=replace(manifest.criu, external=(), lsm=""),
        parts=parts,
        captured=(),
        notes=(),
    )


def _tree(tree: Tree) -> Tree:
    return Tree(
        root=tree.root,
        processes=tuple(_process(one) for one in tree.processes),
        files=(),
        sockets=(),
        pipes=(),
        outside_stdio=(),
        surroundings=Surroundings(),
        cuda=tree.cuda,
        gpu_uses=tree.gpu_uses,
    )


def _process(process: Process) -> Process:
    """Its numbers. A program can give itself a name (comm): that is its own secret as well."""
    return replace(
        process,
        comm="sealed",
        argv=(),
        exe="",
        cwd="",
        root="",
        namespaces={},
        cgroup="",
        descriptors=(),
        environment_names=(),
        gpu_files=(),
    )
