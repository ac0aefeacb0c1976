#!/usr/bin/env bash
# Trains all three stages of the toy. Each starts from the weights of the stage before. At the end,
# the scores of every stage are printed.
#
#   bash stages/tiny.sh --seed 1                  # writes to runs/tiny; flags apply to every stage
#   OUT=runs/again bash stages/tiny.sh            # writes to another directory
#   STAGE1=runs/stage1-tiny bash stages/tiny.sh   # uses an existing model of stage 1
#
# If you start it again after an interruption, it continues from the newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/tiny}
stage1=${STAGE1:-$out/stage1}
train() { python train.py --tiny --resume "$@"; }

[ -n "${STAGE1:-}" ] || train --stage 1 --out "$stage1" "$@"
train --stage 2 --else-init "$stage1" --out "$out/stage2" "$@"
train --stage 3 --else-init "$out/stage2" --out "$out/stage3" "$@"
tail -qn 1 {"$stage1","$out/stage2","$out/stage3"}/log.jsonl
