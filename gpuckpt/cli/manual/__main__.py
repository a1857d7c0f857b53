"""Write the man pages and the completion scripts below a directory."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuckpt.cli.manual.generate import files


def main() -> None:
    """Write every generated file below the directory named on the command line."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, text in files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
