"""The whole matrix of a migration's faults: crossings.py [--only TARGET] [--step STEP]

Every process of a migration is killed at every step of it, one after another, between two hosts with namespaces of
their own. Prints the table and keeps it in CROSSINGS.md beside this file. Status 1 when a cell is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import twohosts
from tests.faults.crossing import CELLS, STEPS, TARGETS, Outcome, cross

TABLE = Path(__file__).with_name("CROSSINGS.md")
HEAD = """# A migration with something killed in it

`make crossings` kills (`-9`) each process of a migration at each of its steps, and looks where the job is afterwards: exactly one
copy runs, or one is held on the source and `gpuckpt restore --tree` brings it back. Of CRIU only kills from `given` on are here: one
that is killed before takes a job with connections along, which then comes back from its image on the other host
(tests/faults/test_crossing.py). "ended before": there was nobody to kill any more.

| killed | at | status | the job | |
|---|---|---|---|---|
"""


def main() -> int:
    """All cells, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TARGETS, action="append")
    parser.add_argument("--step", choices=STEPS, action="append")
    given = parser.parse_args()
    why = twohosts.missing()
    if why:
        print(f"crossings: {why}", file=sys.stderr)
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="crossings-") as place:
        hosts = twohosts.TwoHosts(Path(place))
        try:
            for target, step in CELLS:
                if target in (given.only or TARGETS) and step in (given.step or STEPS):
                    outcomes.append(cross(hosts, len(outcomes), target, step))
                    print(outcomes[-1].row(), "" if outcomes[-1].right else outcomes[-1].words, flush=True)
        finally:
            hosts.end()
    if not (given.only or given.step):
        TABLE.write_text(HEAD + "".join(f"{outcome.row()}\n" for outcome in outcomes))
    return _told(outcomes)


def _told(outcomes: list[Outcome]) -> int:
    wrong = [outcome for outcome in outcomes if not outcome.right]
    print(f"{len(outcomes)} cells, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
