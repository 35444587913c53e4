"""Worlds from the command line.

python -m halocline.faults --seed 17              what happens in world 17, and its digest
python -m halocline.faults --seed 17 --trace      all of it
python -m halocline.faults --seed 0 --faults 2000 worlds one after the other, until so many faults were injected
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from halocline.faults.sketch import draw
from halocline.faults.world import MOST_FAULTS, explore, explore_many


def main(arguments: Sequence[str] | None = None) -> int:
    """Run worlds; the exit status is 1 if a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m halocline.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", type=int, default=0, help="go on with the next seeds until so many are injected")
    parser.add_argument("--most", type=int, default=MOST_FAULTS, help="the most faults of one world")
    parser.add_argument("--breakdown", type=float, default=0.0, help="how often steps break as well, per message")
    parser.add_argument("--trace", action="store_true", help="print everything that clients hear and workers suffer")
    chosen = parser.parse_args(arguments)
    if not chosen.faults:
        print("\n".join(draw(chosen.seed).describe()))
        story = explore(chosen.seed, chosen.most, breakdown=chosen.breakdown, note=print if chosen.trace else None)
        print(story.line())
        print(story.details, end="")
        return 0 if story.fault is None else 1
    began = time.perf_counter()
    tally = explore_many(chosen.seed, chosen.faults, chosen.most, chosen.breakdown)
    print("\n".join(tally.lines()))
    print(f"{time.perf_counter() - began:.1f} s")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
