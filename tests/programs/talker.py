"""A job with its heart on its standard streams: talker.py LOG

Prints a rising number to stdout and writes it to LOG; answers 'heard LINE' to each line of stdin; prints the
signals it gets. Ends with 7 at TERM, 0 at USR1, 3 at USR2, by the signal itself at ALRM. A stream that breaks
is written to LOG as 'BROKEN WHY'.
"""

import itertools
import os
import select
import signal
import sys

PAUSE_SECONDS = 0.03


def say(text: str) -> None:
    """One line on stdout."""
    os.write(1, text.encode() + b"\n")


def leave(status: int, word: str):
    """A handler that says a word and ends the job."""

    def handler(*_: object) -> None:
        say(word)
        os._exit(status)

    return handler


def main(path: str) -> None:
    """Talk for ever."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    signal.signal(signal.SIGTERM, leave(7, "TERM"))
    signal.signal(signal.SIGUSR1, leave(0, "USR1"))
    signal.signal(signal.SIGUSR2, leave(3, "USR2"))
    signal.signal(signal.SIGINT, lambda *_: say("INT"))
    signal.signal(signal.SIGWINCH, lambda *_: say("SIZE {1} {0}".format(*os.get_terminal_size(1))))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    listens = True
    try:
        for number in itertools.count(1):
            say(str(number))
            os.write(log, b"%d\n" % number)
            if select.select([0] if listens else [], [], [], PAUSE_SECONDS)[0]:
                line = os.read(0, 1000)
                listens = bool(line)
                if line:
                    say(f"heard {line.decode().strip()}")
    except OSError as error:
        os.write(log, f"BROKEN {error}\n".encode())
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
