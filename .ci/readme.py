"""The commands of README.md and docs/, taken from the pages instead of being typed again here.

    python .ci/readme.py install           the pip command of a machine with a GPU, which fits all
    python .ci/readme.py first             the first training command, which runs in full
    python .ci/readme.py tests             the first test command, for a plain install
    python .ci/readme.py pages PAGE ..     other commands of pages; the steps they name are capped
    python .ci/readme.py scores FILE       compares the first command's result.json with the targets
    python .ci/readme.py stderr FILE ..    refuses what a command must not write to stderr

Commands are blocks that are marked as bash, where a backslash continues a line, and the last cells
of tables, if they begin with python.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FIRST = "python train.py --stage 1 --tiny"
# whole recipes of the toy, whose time README.md states; the second in a few steps
RECIPES = (FIRST, "STAGE1=runs/stage1-tiny bash stages/tiny.sh")
MAX_STEPS = 4                        # of a training command other than the first
# Below the targets of evaluation/report.py by as much as the scores of 100 images change from one
# processor, or number of threads, to another, since these round differently.
TARGETS = {"point_f1": 0.87, "count_accuracy": 0.90, "caption_exact": 0.66}
# A line of tqdm, or a sentence of one of our commands.
ALLOWED = re.compile(r"\d+%\||\d+(it|B)? \[|^(train[.]py|tools\.\w+): ")


def commands(page):
    """All commands of a page, those of its tables first, without comments."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^\|.*\| `(python [^`]+)` \|$", text, re.MULTILINE)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            without_comment = line.split("   #")[0]
            found += [" ".join(part.split()) for part in without_comment.split(" && ")]
    return [command for command in found if command and not command.startswith("#")]


def shortened(command):
    """A training command with few steps and one held-out example of each kind. Other commands than
    RECIPES name their steps: as they are written, they take minutes.

    tools.play, which runs until Ctrl-C, gets it after 20 seconds: `timeout` then ends with 124.
    """
    if command.startswith("python -m tools.play"):
        return f"timeout -s INT -k 10 20 {command} --port 0 --no-browser || [ $? = 124 ]"
    if "train.py" not in command and "stages/" not in command:
        return command
    if "--steps" not in command:
        assert command in RECIPES, f"it would train for hours, without --steps: {command}"
        command += " --steps 3"
    if "--eval-images" not in command:
        command += " --eval-images 1"
    return re.sub(r"--steps (\d+)", lambda m: f"--steps {min(int(m[1]), MAX_STEPS)}", command)


def others(page):
    own = ("pip ", "git ", "python -m pytest")
    return [shortened(c) for c in commands(page) if c != FIRST and not c.startswith(own)]


def check_scores(path):
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    below = {name: result["eval"][name] for name in TARGETS if result["eval"][name] < TARGETS[name]}
    assert not below, f"below the targets {TARGETS}: {below}"
    print(f"{TARGETS} are reached after {result['seconds']} s")


def check_stderr(path):
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    # tqdm moves the cursor up after it has written a second bar below the first
    lines = re.split(r"[\r\n]+", text.replace("\x1b[A", ""))
    wrong = [line for line in lines if line.strip() and not ALLOWED.search(line)]
    assert not wrong, f"{len(wrong)} lines on stderr that are not its user's:\n" + "\n".join(wrong)


def main(what, *arguments):
    readme = commands(README)
    if what == "install":
        print(re.search(r"pip install -r requirements\.txt", README.read_text(encoding="utf-8"))[0])
    elif what == "first":
        assert FIRST in readme, f"README.md does not show: {FIRST}"
        print(FIRST)
    elif what == "tests":
        print(next(command for command in readme if command.startswith("python -m pytest")))
    elif what == "pages":
        print("\n".join(command for page in arguments for command in others(Path(page))))
    elif what == "scores":
        check_scores(*arguments)
    else:
        check_stderr(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
