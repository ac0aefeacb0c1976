"""The commands of README.md and docs/, taken from the pages instead of being typed again here.

    python .ci/readme.py install       the first pip command
    python .ci/readme.py first         the first training command, which runs in full
    python .ci/readme.py tests         the test commands
    python .ci/readme.py others        all other commands; the steps that they name are capped
    python .ci/readme.py check JSON    compares the first command's last line with the aims

Only blocks that are marked as bash are commands; a backslash continues a line.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = "python train.py --stage 1 --tiny"
# whole recipes of the toy, whose time README.md states; the second in a few steps
RECIPES = (FIRST, "STAGE1=runs/stage1-tiny bash stages/tiny.sh")
MAX_STEPS = 4                        # of a training command other than the first
# A little below the worst of three seeds (RESULTS.md): another processor or number of threads
# rounds differently, which changes the scores as much as another seed does.
AIMS = {"point_f1": 0.85, "count_accuracy": 0.90, "caption_exact": 0.64}


def commands():
    """All commands of all pages in their order, without comments."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                without_comment = line.split("   #")[0]
                found += [" ".join(part.split()) for part in without_comment.split(" && ")]
    return [command for command in found if command and not command.startswith("#")]


def shortened(command):
    """A training command with few steps and one held-out example of each kind.

    Other commands than RECIPES name their steps: as they are written, they take minutes.
    """
    if "train.py" not in command and "stages/" not in command:
        return command
    if "--steps" not in command:
        assert command in RECIPES, f"it would train for hours, without --steps: {command}"
        command += " --steps 3"
    if "--eval_images" not in command:
        command += " --eval_images=1"
    return re.sub(r"--steps (\d+)", lambda m: f"--steps {min(int(m[1]), MAX_STEPS)}", command)


def others():
    own = ("pip ", "git ", "python -m pytest")
    return [shortened(c) for c in commands() if c != FIRST and not c.startswith(own)]


def check(last_line):
    result = json.loads(last_line)
    below = {name: result["eval"][name] for name in AIMS if result["eval"][name] < AIMS[name]}
    assert not below, f"below the aims {AIMS}: {below}"
    print(f"the aims {AIMS} are reached after {result['seconds']} s")


def main(what, *arguments):
    if what == "install":
        print(next(command for command in commands() if command.startswith("pip install")))
    elif what == "first":
        assert FIRST in commands(), f"README.md does not show: {FIRST}"
        print(FIRST)
    elif what == "tests":
        print("\n".join(c for c in commands() if c.startswith("python -m pytest")))
    elif what == "others":
        print("\n".join(others()))
    else:
        check(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
