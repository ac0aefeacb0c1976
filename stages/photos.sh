#!/usr/bin/env bash
# Composed photographs: from cut-outs, a language model and no vision tower to a model that is asked
# to point, to count and to describe (docs/photos.md: where the folders come from, what it learns):
#
#   STAMPS=stamps LLM=smollm2 BACKGROUNDS=photographs bash stages/photos.sh
#
# DEVICE=cuda: connector and evaluation on a GPU (the training uses one by itself). SIZE: pixels
# along one side of an image. Flags go to the training. When started again after an interruption, it
# continues where it was. To try it in minutes: OUT=runs/try SCENES=90 HELD_OUT=4 TOWER_STEPS=9
# CONNECTOR_STEPS=9, and the flag --steps 5.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/composed}
world=(--kinds toy/stamp_kinds.json --backgrounds "$BACKGROUNDS")

# data.json is the last file of a model folder, masks.npz that of the data
if [ ! -f "$out/base/data.json" ]; then
  python -m tools.tower "$STAMPS" "$out/tower" "${world[@]}" --steps "${TOWER_STEPS:-2400}"
  rm -rf "$out/base"
  python -m tools.hf base "$LLM" "$out/tower" "$out/base"
fi
if [ ! -f "$out/start/data.json" ]; then
  python -m tools.connector "$out/base" "$STAMPS" "$out/start" "${world[@]}" \
      --steps "${CONNECTOR_STEPS:-400}" --device "${DEVICE:-cpu}"
fi
if [ ! -f "$out/data/masks.npz" ]; then
  python -m tools.prepare stamps "$STAMPS" "$out/data" "${world[@]}" --n "${SCENES:-3000}" \
      --held-out "${HELD_OUT:-60}" --size "${SIZE:-168}" --languages en de
fi
python train.py --stage 1 --tiny --resume --data "$out/data/train.jsonl" --media "$out/data/media" \
    --else-init "$out/start" --out "$out/model" --steps 450 --save-every 100 --batch 2 \
    --data.length_hint=1 --lora 16 --lr.llm=2e-3 --lr.connector=1e-4 --warmup.llm=10 \
    --warmup.connector=10 "$@"
for data in "$out"/data/{known,stamps,backgrounds,kinds}.jsonl; do
  part=$(basename "$data" .jsonl)
  [ -f "$data" ] || continue                   # one background alone is not held out
  python -m tools.evaluate --model "$out/model" --data "$data" --media "$out/data/media" \
      --masks "$out/data/masks.npz" --draw "$out/$part" --out "$out/$part" --max-new 100 \
      --device "${DEVICE:-cpu}"
done
python -m tools.photo_scores "$out"
