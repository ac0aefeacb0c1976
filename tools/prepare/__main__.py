"""Prepares the media of records for training.

    python -m tools.prepare frames tests/media/films.jsonl runs/frames \\
        --media tests/media --max-frames 8

`frames` decodes videos once. Published data sets are converted by tools.convert --as NAME.
"""

import shlex
import sys

from records.errors import UserError
from tools.command import make_parser, report_errors
from tools.convert.sets import SETS
from tools.prepare import frames

RENAMED = {  # sets of earlier versions
    "molmo2-videopointeval": "benchmark-molmo2-videopoint",
    "molmo2-videocounteval": "benchmark-molmo2-videocount"}


@report_errors
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["frames"]:
        return frames.main(argv[1:])
    if argv and argv[0] in {*SETS, *RENAMED}:  # the command of earlier versions
        name, *words = argv
        n_paths = next((k for k, word in enumerate(words) if word[:1] == "-"), len(words))
        paths = words[:n_paths] + ["SOURCE", "OUT"][n_paths:]
        paths[-1] += "/records.jsonl"
        words = [*paths, *words[n_paths:], "--as", RENAMED.get(name, name)]
        raise UserError("published sets are converted by tools.convert now: python -m "
                        f"tools.convert {shlex.join(words)}")
    parser = make_parser("prepare", __doc__)
    parser.add_argument("what", choices=["frames"], help="frames has its own --help")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
