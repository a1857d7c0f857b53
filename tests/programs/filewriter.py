"""A job with one file that it writes: filewriter.py KIND FILE [STRIDE]

log      opened anew ("w"): a rising number, one a line
append   the same, opened for appending only
pages    a data base file, opened "r+": sixteen numbers STRIDE bytes apart (4096), of which one is changed each
         time. Each must be what was written last, else the job ends: whoever brings it back with another file
         is found out
mapped   the same through a shared mapping
linked   the same, written under one name and read under another, FILE.too, of the same file
"""

import itertools
import mmap
import os
import struct
import sys
import time

PAUSE_SECONDS = 0.02
SLOTS = 16
WORD = struct.Struct("<q")


def lines(path: str, flags: int) -> None:
    """Count for ever."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o640)
    for count in itertools.count(1):
        os.write(log, b"%d\n" % count)
        time.sleep(PAUSE_SECONDS)


def pages(read, write, stride: int) -> None:
    """Change one slot after the other and look at all of them."""
    known = [0] * SLOTS
    for count in itertools.count(1):
        found = [WORD.unpack(read(slot * stride, WORD.size))[0] for slot in range(SLOTS)]
        if found != known:
            sys.exit(f"{found} instead of {known}")
        known[count % SLOTS] = count
        write(count % SLOTS * stride, WORD.pack(count))
        time.sleep(PAUSE_SECONDS)


def main(kind: str, path: str, stride: int) -> None:
    """Work for ever."""
    if kind in ("log", "append"):
        lines(path, os.O_TRUNC if kind == "log" else os.O_APPEND)
    file = other = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    os.ftruncate(file, SLOTS * stride)
    if kind == "linked":
        os.link(path, f"{path}.too")
        other = os.open(f"{path}.too", os.O_RDWR)
    if kind == "mapped":
        memory = mmap.mmap(file, SLOTS * stride)
        os.close(file)

        def write(at: int, word: bytes) -> None:
            memory[at : at + len(word)] = word

        pages(lambda at, size: memory[at : at + size], write, stride)
    pages(lambda at, size: os.pread(other, size, at), lambda at, word: os.pwrite(file, word, at), stride)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4096)
