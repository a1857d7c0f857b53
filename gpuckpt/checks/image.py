"""Checks of the place where an image will lie or lies."""

from __future__ import annotations

import stat

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, size, unknown
from gpuckpt.checks.facts import DumpFacts, HasLeftovers, RestoreFacts
from gpuckpt.checks.filechoice import chosen_files
from gpuckpt.checks.gpu import gpu_bytes
from gpuckpt.model.facts import Tree
from gpuckpt.model.manifest import LINK_REMAP

SPARE = 1.1
"""CRIU's own files and what the job takes meanwhile."""


def _absent(facts: DumpFacts) -> Judgement:
    path = facts.request.image
    if not facts.image_exists:
        return passed("nothing at the image path", str(path))
    return failed("nothing at the image path", f"{path} exists", "name a new path; gpuckpt never replaces an image")


def _parent(facts: DumpFacts) -> Judgement:
    parent = facts.request.image.parent
    if facts.image_parent_ok:
        return passed("a directory for the image", str(parent))
    return failed("a directory for the image", f"{parent} is no directory", f"make it first: mkdir -p -m 700 {parent}")


def _parent_safe(facts: DumpFacts) -> Judgement | None:
    if not facts.image_parent_ok:
        return None
    mode, parent = facts.image_parent_mode, facts.request.image.parent
    expected = "a directory in which only root, or you, can replace the image"
    hint = f"chmod go-w {parent}, or name another directory: whoever can replace an image decides what a restore runs"
    # With the sticky bit (as /tmp) others can add names but not rename or remove the image.
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return failed(expected, f"{parent} has mode {stat.S_IMODE(mode):04o}", hint)
    if facts.image_parent_owner not in (0, facts.own_uid):
        return failed(expected, f"{parent} belongs to uid {facts.image_parent_owner}", hint)
    if facts.unsafe_ancestors:
        return failed(expected, listing(facts.unsafe_ancestors), hint)
    return passed(expected, f"{parent} has mode {stat.S_IMODE(mode):04o}")


def memory_bytes(tree: Tree) -> int:
    """The most memory a dump can have to save, before the GPU's; resident memory includes the shared."""
    return sum(max(process.rss_bytes, process.shared_bytes) + process.swap_bytes for process in tree.processes)


def _space(facts: DumpFacts) -> Judgement:
    ghosts = sum(file.blocks_bytes for file in facts.tree.files if file.deleted)
    saved = sum(file.blocks_bytes for file in chosen_files(facts.request, facts.tree).files)
    on_gpu = gpu_bytes(facts.tree)
    full = memory_bytes(facts.tree) + ghosts + saved + (on_gpu or 0)
    # A base may hold any of the memory; deleted and captured files lie outside the packs and are never shared.
    least = max(full - facts.base_bytes, ghosts + saved) if facts.base_bytes is not None else full
    need, most = int(least * SPARE), int(full * SPARE)
    expected = f"{size(most)} free for the image in {facts.request.image.parent}"
    if need < most:
        expected = f"{size(need)} free for what the base cannot hold, or up to {expected}"
    free, found = _free(facts, on_gpu or 0)
    if free is None:
        return unknown(expected, "the free space is not known", "look at it with `df` before you go on")
    hint = "free space there or name a directory on a larger file system"
    if free < need:
        return failed(expected, found, hint)
    if on_gpu is None:
        return unknown(f"{expected}, and the job's GPU memory", f"{found}; the GPU memory is not known", hint)
    if free < most:
        hint = "if it does not suffice for what has changed since the base, the dump fails and the tree runs on"
        return failed(expected, found, hint, severity="warn")
    return passed(expected, found)


def _free(facts: DumpFacts, on_gpu: int) -> tuple[int | None, str]:
    """Bytes for the image, and in words. A tmpfs may be larger than the memory it lies in, beside the job's."""
    free = facts.image_space_bytes
    if free is None or not facts.image_in_memory:
        return free, f"{size(free or 0)} free"
    left = max(0, facts.host.memory_available_bytes - on_gpu)
    if free <= left:
        return free, f"{size(free)} free"
    beside = ", beside the driver's copy of the GPU memory" if on_gpu else ""
    return left, f"{size(left)} free in the host's memory, where it would lie{beside}"


def _image_safe(facts: RestoreFacts) -> Judgement | None:
    mode, owner, path = facts.image_mode, facts.image_owner, facts.request.image
    if mode is None:
        return None
    expected = "an image that only root, or you, can change"
    found = []
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        found.append(f"{path} has mode {stat.S_IMODE(mode):04o}")
    if owner not in (None, 0, facts.own_uid):
        found.append(f"{path} belongs to uid {owner}")
    if found:
        hint = f"if you trust what is in it: chown -R 0:0 {path} and chmod -R go-w {path}; a restore runs it as root"
        return failed(expected, listing(found), hint)
    hint = f"whoever can exchange {path} decides what a restore runs as root: move it where only root can, as /var/lib"
    return none_of(facts.unsafe_ancestors, expected=expected, hint=hint, fine=f"mode {stat.S_IMODE(mode):04o}")


def _original_gone(facts: RestoreFacts) -> Judgement | None:
    if not facts.manifest.left_running:
        return None
    expected = "the original, which the dump left running, has ended"
    where = facts.manifest.host.hostname
    if where != facts.host.hostname:
        hint = f"end process {facts.tree.root.pid} on {where} first: two copies would write into the same shared files"
        return unknown(expected, f"it may still run on {where}", hint)
    if facts.tree.root.pid in facts.ids_in_use:
        return failed(expected, facts.ids_in_use[facts.tree.root.pid], "see pids-free")
    return passed(expected, "no process has its pid")


def _linked_files(facts: RestoreFacts) -> Judgement | None:
    needed = {(file.device, file.inode): file.path for file in facts.tree.files if file.deleted and file.links > 0}
    if not needed:
        return None
    saved = [captured.path for captured in facts.manifest.captured if captured.reason == LINK_REMAP]
    expected = f"{len(needed)} deleted files that had another name (POSIX semaphores), saved in the image"
    if len(saved) >= len(needed):
        return passed(expected, f"{len(saved)} saved")
    hint = "take another image: CRIU needs them and they are neither in this image nor, mostly, on this host"
    return failed(expected, f"{len(saved)} saved, for {listing(needed.values())}", hint)


def _leftovers(facts: HasLeftovers) -> Judgement:
    hint = "the next dump, restore or `gpuckpt restore --tree PID` puts it right"
    return none_of(facts.leftovers, expected="nothing left by an interrupted run", hint=hint)


IMAGE_ABSENT: Check[DumpFacts] = Check(
    "image-absent", "block", "nothing stands at the image's path", _absent, allowable=False
)
IMAGE_PARENT: Check[DumpFacts] = Check(
    "image-parent", "block", "the image's directory exists", _parent, status=21, allowable=False
)
IMAGE_PARENT_SAFE: Check[DumpFacts] = Check(
    "image-parent-safe", "block", "nobody else can replace the image", _parent_safe
)
DISK_SPACE: Check[DumpFacts] = Check("disk-space", "block", "the image will fit on its file system", _space)
IMAGE_SAFE: Check[RestoreFacts] = Check("image-safe", "block", "nobody else can change the image", _image_safe)
"""--allow opens only what is said about the way to the image: open_image never opens one that others can write."""

ORIGINAL: Check[RestoreFacts] = Check(
    "original", "warn", "the original of an image of a running job has ended", _original_gone
)
LINKED_FILES: Check[RestoreFacts] = Check(
    "linked-files", "block", "deleted files with another name are in the image", _linked_files
)
LEFTOVERS: Check[HasLeftovers] = Check("leftovers", "warn", "no interrupted run left anything here", _leftovers)
