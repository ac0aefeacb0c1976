#!/usr/bin/env bash
# Composed photographs: from cut-outs, a language model and no vision tower to a model that points,
# counts and describes (docs/photos.md says where the three folders come from):
#
#   STAMPS=stamps LLM=smollm2 BACKGROUNDS=photographs bash stages/photos.sh
#   SCENES=100 HELD_OUT=4 TOWER_STEPS=20 .. bash stages/photos.sh --steps 5      # only to try it
#
# Flags go to both trainings. When started again after an interruption, it continues where it was.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/photos}
world=(--kinds toy/stamp_kinds.json --backgrounds "$BACKGROUNDS")

# scenes OUT FLAGS: the records of OUT, with captions in two languages
scenes() {
  [ -f "$1/masks.npz" ] || python -m tools.prepare stamps "$STAMPS" "$@" "${world[@]}" \
      --n "${SCENES:-8000}" --held-out "${HELD_OUT:-100}" --languages en de
}

# train DATA INIT OUT FLAGS: a connector, and adapters on the language model
train() {
  python train.py --stage 1 --tiny --resume --data "$1/train.jsonl" --media "$1/media" \
      --eval "$1/stamps.jsonl" --else-init "$2" --out "$3" --lora 16 --lr.llm=1e-3 \
      --lr.connector=1e-3 --batch 2 "${@:4}"
}

if [ ! -f "$out/base/config.json" ]; then
  python -m tools.tower "$STAMPS" "$out/tower" "${world[@]}" --steps "${TOWER_STEPS:-4000}"
  python -m tools.hf base "$LLM" "$out/tower" "$out/base"
fi
scenes "$out/one" --max-objects 1        # with one object first, the kinds are learned sooner
scenes "$out/data"
train "$out/one" "$out/base" "$out/first" --steps 400 "$@"
train "$out/data" "$out/first" "$out/model" --steps 800 "$@"
for part in known stamps backgrounds kinds; do
  python -m tools.evaluate --model "$out/model" --data "$out/data/$part.jsonl" \
      --media "$out/data/media" --masks "$out/data/masks.npz" --draw "$out/$part" --out "$out/$part"
done
