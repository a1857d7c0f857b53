"""Why CRIU failed: patterns of its log, the plain cause of each, and what to do about it. Data only.

The first row that fits wins, so special rows stand before general ones. Named groups of a pattern are
filled into the texts; `path` and `target` get their leading slash back, which CRIU's restore drops.
Nearly all were seen with CRIU 3.17, 4.1.1, 4.2.1 or 4.3, the rest come from its source or from reports;
https://github.com/checkpoint-restore/criu/issues/N is meant by "criu#N". Line numbers inside CRIU change
between versions, so none is matched.
"""

from __future__ import annotations

from gpuckpt.system.criu_causes.host import HOST, PROCESSES
from gpuckpt.system.criu_causes.image import FILES, IMAGES
from gpuckpt.system.criu_causes.job import GPU, OBJECTS, SOCKETS, TERMINAL
from gpuckpt.system.criu_causes.row import COPY_AGAIN, Row, row

ROWS: tuple[Row, ...] = (
    *HOST,
    *GPU,
    *OBJECTS,
    *TERMINAL,
    *FILES,
    *SOCKETS,
    *PROCESSES,
    *IMAGES,
)
"""All rows that are matched against single lines."""

LAST_LINE_ROWS: tuple[Row, ...] = (
    row(
        "shell-job-hang",
        r"Restoring (?P<pid>\d+) to \d+ pgid",
        "CRIU waits for ever: the image was dumped with --shell-job and restored without",
        "run the restore again; if it stays, report it as a bug of gpuckpt, which gives CRIU the options of the dump",
    ),
    row(
        "pages-hang",
        r"pie: (?P<pid>\d+): (?:`- returned 0|Preadv )",
        "CRIU waits for ever for memory pages that the image does not have",
        COPY_AGAIN,
    ),
)
"""Matched against the last line of a log without a verdict, when CRIU was ended because it did not end."""

CRASHED = row(
    "criu-crashed", r"", "CRIU itself crashed: a file of the image is missing or damaged (pstree first)", COPY_AGAIN
)
KILLED = row(
    "criu-killed",
    r"",
    "CRIU was killed from outside in the middle of its work",
    "look for what killed it (`dmesg` names the victims of the out-of-memory killer), then run the command again",
)
