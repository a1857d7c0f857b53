"""make soak: dumps and restores of small trees with something killed at a random moment of each.

    soak.py [--count 1000] [--seed 7] [--minutes 90] [--from N] [--fresh]

Goes on where an unfinished soak with the same seed stopped (RESULTS.json beside this file), and stops by itself after
the given time. With --from N one block of turns is done again, from its first turn on, and nothing is written. Status
1 when something was seen that must never be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import harness
from tests.soak.plan import BLOCK
from tests.soak.results import RESULTS, Results
from tests.soak.soaking import Soak


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="turns: dumps and restores together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=90.0, help="stop after this time; the next run goes on")
    parser.add_argument("--from", type=int, dest="first", metavar="N", help="do the block of turn N again")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever RESULTS.json says")
    return parser.parse_args()


def main() -> int:
    """Soak, tell, keep."""
    given = arguments()
    path, reason = harness.criu_or_reason()
    if path is None:
        print(f"make soak: {reason}", file=sys.stderr)
        return 2
    again = given.first is not None
    results = Results(given.seed, given.count) if given.fresh or again else _resumed(given)
    first = given.first // BLOCK * BLOCK if again else results.done
    last = min(given.count, first + BLOCK) if again else given.count
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        results = _soak(Soak(Path(place), given.seed), results, range(first, last), given.minutes * 60)
    print(results.table())
    print(results.line())
    for wrong in results.wrongs:
        print(f"turn {wrong['number']}: {wrong['what']}: {wrong['seen']}\n  evidence: {wrong['evidence']}")
    if not again:
        results.write(RESULTS)
        results.write_line()
    return 1 if results.wrongs else 0


def _resumed(given: argparse.Namespace) -> Results:
    results = Results.resumed(RESULTS, given.seed, given.count)
    if results.done:
        print(f"going on after {results.done} turns")
    return results


def _soak(soak: Soak, results: Results, numbers: range, seconds: float) -> Results:
    began, done = time.monotonic(), numbers.start
    try:
        soak.begin()
        for number in numbers:
            well = soak.run(number)
            done = number + 1
            if not well or done % BLOCK == 0:
                print(
                    f"{done} of {numbers.stop}, {len(soak.wrongs)} wrong, {time.monotonic() - began:.0f} s", flush=True
                )
            if done % BLOCK == 0 and time.monotonic() - began > seconds:
                break
    except KeyboardInterrupt:
        done = done // BLOCK * BLOCK
    finally:
        soak.end()
    results.take(soak, done, time.monotonic() - began)
    return results


if __name__ == "__main__":
    sys.exit(main())
