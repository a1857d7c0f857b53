"""What a soak found: a table for the person, a JSON file that a later run goes on from, a line in the README."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests import harness
from tests.soak.soaking import Soak
from tests.soak.words import WRONGS

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.json"
README = HERE / "README.md"
LAST_LINE = re.compile(r"^Last run: .*$", re.MULTILINE)


@dataclass
class Results:
    """The state of one soak, done in one go or in several."""

    seed: int
    count: int
    done: int = 0
    seconds: float = 0.0
    date: str = ""
    kernel: str = ""
    criu: str = ""
    python: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    wrongs: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def resumed(cls, path: Path, seed: int, count: int) -> Results:
        """The unfinished soak with this seed, to go on with; else a new one."""
        if path.exists():
            known = json.loads(path.read_text())
            known.pop("tally", None)
            found = cls(**known)
            if found.seed == seed and found.done < count:
                found.count = count
                return found
        return cls(seed, count)

    def take(self, soak: Soak, done: int, seconds: float) -> None:
        """Add what a soak has done."""
        self.done, self.seconds = done, round(self.seconds + seconds, 1)
        self.date = time.strftime("%Y-%m-%d", time.gmtime())
        self.kernel, self.criu, self.python = platform.release(), _criu_version(), platform.python_version()
        self.counts = dict(sorted((Counter(self.counts) + soak.counts).items()))
        self.wrongs = self.wrongs + soak.wrongs

    def tally(self) -> dict[str, int]:
        """How often each thing that must never be was seen."""
        return {what: sum(one["what"] == what for one in self.wrongs) for what in WRONGS}

    def line(self) -> str:
        """All of it in one line."""
        bad = ", ".join(f"{number} {what}" for what, number in self.tally().items())
        return (
            f"Last run: {self.date}, Linux {self.kernel}, CRIU {self.criu}, seed {self.seed}: {self.done} of {self.count} "
            f"dumps and restores in {self.seconds / 60:.0f} min: {bad}."
        )

    def write(self, path: Path) -> None:
        """Keep it."""
        path.write_text(json.dumps({**asdict(self), "tally": self.tally()}, indent=1) + "\n")

    def write_line(self) -> None:
        """Keep the line in the README."""
        README.write_text(LAST_LINE.sub(lambda _: self.line(), README.read_text()))

    def table(self) -> str:
        """For the person."""
        rows = [*sorted(self.counts.items()), ("", ""), *self.tally().items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {number:>5}" for name, number in rows)


def _criu_version() -> str:
    criu, _ = harness.criu_or_reason()
    said = subprocess.run([str(criu), "--version"], capture_output=True, text=True, timeout=60).stdout
    return said.split("Version:")[-1].split()[0]
