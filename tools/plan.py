"""python -m tools.plan: packs planned ahead."""

import sys

import plans

if __name__ == "__main__":
    plans.command(sys.argv[1:])
