#!/usr/bin/env bash
# Composed photographs, from packages that hold no model of pictures (docs/photos.md says where the
# three folders come from):
#
#   STAMPS=stamps LLM=smollm2 BACKGROUNDS=photographs bash stages/photos.sh
#   ... bash stages/photos.sh --steps 200         # flags go to the training of the whole model
#
# Stage 0 trains a vision tower on the patches of composed photographs; then a connector and adapters
# on the language model learn to point, count and describe. When started again after an
# interruption, it continues where it was.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/photos}
world=(--kinds toy/stamp_kinds.json --backgrounds "$BACKGROUNDS")

[ -f "$out/data/masks.npz" ] ||
  python -m tools.prepare stamps "$STAMPS" "$out/data" "${world[@]}" --n "${SCENES:-8000}" --languages en de
[ -f "$out/tower/config.json" ] ||
  python -m tools.tower "$STAMPS" "$out/tower" "${world[@]}" --steps "${TOWER_STEPS:-4000}"
[ -f "$out/base/config.json" ] || python -m tools.hf base "$LLM" "$out/tower" "$out/base"

python train.py --stage 1 --tiny --resume --else-init "$out/base" --out "$out/model" \
    --data "$out/data/train.jsonl" --media "$out/data/media" --eval "$out/data/stamps.jsonl" \
    --lora 16 --lr.llm=1e-3 --lr.connector=1e-3 --batch 2 --steps 1200 "$@"
for part in known stamps backgrounds kinds; do
  python -m tools.evaluate --model "$out/model" --data "$out/data/$part.jsonl" \
      --media "$out/data/media" --masks "$out/data/masks.npz" --draw "$out/$part" --out "$out/$part"
done
