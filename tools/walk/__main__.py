"""Makes the walk through one packed row, and checks its exercises.

    python -m tools.walk                              # writes docs/walk/ and docs/images/whole.png
    python -m tools.walk --check docs/walk/mine.py    # the exercises, with your functions

The page, its pictures and the notebook come from tools/walk/page.txt.
"""

import argparse
import sys
from pathlib import Path

from tools.walk import check, pages

ROOT = Path(__file__).parents[2]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT, help="the repository to write into")
    parser.add_argument("--check", type=Path, metavar="FILE", help="a file with your functions")
    args = parser.parse_args(argv)
    if args.check:
        return check.main(args.check)
    for path in pages.write(args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
