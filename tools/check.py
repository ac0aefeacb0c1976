"""python -m tools.check FILE: what is wrong with a file of records."""

import sys

from records.reader import check_command

if __name__ == "__main__":
    sys.exit(check_command(sys.argv[1:]))
