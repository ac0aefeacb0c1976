#!/usr/bin/env bash
# All three stages of the toy, each from the weights of the one before, and one table of what each has learned.
#
#   bash stages/tiny.sh                           # into runs/tiny; other flags go to every stage: --seed 1, --device cuda, --steps 3
#   OUT=runs/again bash stages/tiny.sh
#   SEE=runs/stage1-tiny bash stages/tiny.sh      # a stage 1 that is there already
#
# Stopped or killed, it goes on from the newest checkpoint when started again.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/tiny}
first=${SEE:-$out/stage1}
[ -n "${SEE:-}" ] || python train.py --stage 1 --tiny --resume --out "$out/stage1" "$@"
python train.py --stage 2 --tiny --resume --else-init "$first" --out "$out/stage2" "$@"
python train.py --stage 3 --tiny --resume --else-init "$out/stage2" --out "$out/stage3" "$@"
python -m tools.runs "$first" "$out/stage2" "$out/stage3"
