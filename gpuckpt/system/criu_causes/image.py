"""Failures around files: those of the image, and those the job needs."""

from __future__ import annotations

from gpuckpt.system.criu_causes.row import COPY_AGAIN, Row, row

_BUG = "report it as a bug of gpuckpt, which asks CRIU to keep such files"
_SAME_BUILD = "install the same build of this file as on the source host"

FILES: tuple[Row, ...] = (
    row(
        "link-remap-off",
        r"Can't create link remap for (?P<path>.*?)\. Use link-remap",
        "{path} was deleted under that name while it is still in use (a POSIX semaphore of multiprocessing)",
        _BUG,
    ),
    row(
        "link-remap-gone",  # criu#2016
        r"Error .*Can't link (?P<path>.*link_remap\.\d+) -> (?P<target>.*): No such file",
        "{path}, the file behind {target}, is gone: the image was left running, moved, or the host restarted",
        "restore an image in which gpuckpt captured that file",
    ),
    row(
        "link-remap-stale",
        r"Can't link remap to (?P<path>.*): File exists",
        "{path} is a leftover of an older dump",
        "remove that file if no other image needs it",
    ),
    row(
        "ghost",
        r"Can't dump ghost file (?P<path>.*) of (?P<size>\d+) size, increase limit",
        "the deleted file {path} is still open and larger than the limit ({size} bytes)",
        "let the job close it, then dump again",
    ),
    row(
        "size-changed",
        r"File (?P<path>.+) has bad size (?P<size>\d+) \(expect (?P<expected>\d+)\)",
        "{path} has {size} bytes now and had {expected} at the dump",
        "a file that only grew: `cp -a {path} {path}.later && truncate -s {expected} {path}`; a program or library: "
        + _SAME_BUILD,
    ),
    row(
        "build-changed",
        r"File (?P<path>.+) has bad build-ID",
        "{path} is another build than at the dump",
        _SAME_BUILD,
    ),
    row(
        "mode-changed",
        r"File (?P<path>.+) has bad mode 0?(?P<mode>\d+) \(expect 0?(?P<expected>\d+)\)",
        "the permissions of {path} are {mode} and were {expected} at the dump (octal)",
        "set them back with chmod",
    ),
    row(
        "directory-missing",
        r"Can't open file (?P<path>.+?) on restore: |Can't open cwd",
        "the working directory {path} does not exist here",
        "make that directory",
        also=r"Can't open cwd",
    ),
    row(
        "file-missing",
        r"Can't open file (?P<path>.+?) on restore: (?P<reason>.*)",
        "{path} cannot be opened here: {reason}",
        "copy it to the same path",
    ),
    row(
        "locks",
        r"Some file locks are hold by dumping tasks",
        "the job holds file locks",
        "try again: the job took them just then; gpuckpt asks CRIU to save those it saw",
    ),
)

IMAGES: tuple[Row, ...] = (
    row(
        "disk-full",  # criu#217
        r"(?:page-xfer|bfd|image|img|spice|splice).*No space left on device",
        "the file system of the image is full",
        "free space or choose another directory; the unfinished image is worthless",
    ),
    row(
        "image-cut",
        r"Read (?P<size>\d+) bytes while (?P<expected>\d+) expected(?: from (?P<path>.+?\.img))?",
        "the image is cut: {path} has only {size} of {expected} bytes that belong together",
        COPY_AGAIN,
    ),
    row(
        "image-damaged",
        r"Img trimmed|Failed unpacking object(?: \S+ from (?P<path>.+\.img))?",
        "the image is damaged: {path}",
        COPY_AGAIN,
    ),
    row(
        "image-file-missing",
        r"Unexpected EOF on \(empty-image\)",
        "a file of the image is missing, or this is no image directory",
        COPY_AGAIN,
    ),
    row(
        "pages-missing",
        r"Can't read pages data|Unexpected EOF reading pages data",
        "the memory pages of the image are missing or cut",
        COPY_AGAIN,
    ),
    row(
        "ids-missing",
        r"Images corrupted or too old criu|No IDS for root task",
        "the image lacks its ids file",
        COPY_AGAIN,
    ),
    row(
        "descriptors-missing",
        r"Empty list on file desc id|BUG at criu/files\.c",
        "the image lacks a list of open files (fdinfo)",
        COPY_AGAIN,
    ),
    row(
        "image-format",
        r"[Mm]agic doesn't match|Too old image|Not supported images version",
        "these are no CRIU images, or they come from another version of CRIU",
        "install the CRIU version of the source host, or a newer one",
    ),
    row(
        "crash",
        r"killed by signal 11",
        "a process died while it was built: a file of the image is missing (pstree, mm, fs or files)",
        COPY_AGAIN + "; with CRIU below 3.17 and glibc 2.35 or newer: install a newer CRIU",
    ),
)
