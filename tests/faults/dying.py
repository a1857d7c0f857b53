"""gpuckpt that dies by SIGKILL at one exact call: dying.py MODULE:FUNCTION before|after TEXT ARGUMENTS...

The function is the real one, and so is the death: nothing is cleaned up. It dies at the first call of which an
argument holds TEXT.
"""

import importlib
import os
import signal
import sys


def main(where: str, when: str, text: str) -> None:
    """Wrap the function, then be gpuckpt."""
    module, _, name = where.partition(":")
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for step in path:
        owner = getattr(owner, step)
    real = getattr(owner, last)

    def dying(*arguments, **options):
        meant = any(text in str(argument) for argument in arguments)
        if meant and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if meant:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, dying)
    from gpuckpt.cli.app import main as gpuckpt

    gpuckpt()


if __name__ == "__main__":
    wanted = sys.argv[1:4]
    sys.argv[1:4] = []
    main(*wanted)
