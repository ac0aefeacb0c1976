#!/usr/bin/env bash
# All three stages of the toy, each from the weights of the one before, and then the scores of each.
#
#   bash stages/tiny.sh --seed 1                  # into runs/tiny; flags go to every stage
#   OUT=runs/again bash stages/tiny.sh            # into another directory
#   STAGE1=runs/stage1-tiny bash stages/tiny.sh   # from a stage 1 that exists
#
# When started again after an interruption, it continues from the newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/tiny}
stage1=${STAGE1:-$out/stage1}
train() { python train.py --tiny --resume "$@"; }

[ -n "${STAGE1:-}" ] || train --stage 1 --out "$stage1" "$@"
train --stage 2 --else-init "$stage1" --out "$out/stage2" "$@"
train --stage 3 --else-init "$out/stage2" --out "$out/stage3" "$@"
tail -qn 1 {"$stage1","$out/stage2","$out/stage3"}/log.jsonl
