#!/usr/bin/env bash
# Measures one GPU; docs/gpu.md explains the numbers. The groups of commands that are named run one
# after the other. Without a name, all run but `before`:
#
#   bash docs/bench/gpu.sh runs/gpu train attend
#
# The first argument is a folder. The JSON line of each command is appended to its lines.jsonl, and
# all other output to its log. A command that fails, or that takes longer than its limit, does not
# stop the others. The last lines name it.
#
#   group    limit in seconds, and what it measures
#   train     480  steps of stages 1, 2 and 3, as one rank of 8, with the share of each kernel
#   attend    120  attention beside a dense mask, a loop and a causal mask; the order of the tokens
#   before    460  train and attend with the code of commit ed0357c, which the folder $BEFORE has
#   tests     240  the tests that need a GPU
#   toy       240  the whole first training, with its scores
#   lora       90  steps with LoRA
#   answer    120  prefill of 128 frames, and decoding
#   load       90  frames decoded per second
set -uo pipefail

mkdir -p "${1:?the first argument is a folder for the results}"
out=$(realpath "$1")
shift
cd "$(dirname "$0")/../.." || exit 2
device=${DEVICE:-cuda}
failed=()

# measure SECONDS COMMAND ..
measure() {
  local limit=$1 begun=$SECONDS
  shift
  echo "=== $*" | tee -a "$out/log"
  if timeout -k 10 "$limit" "$@" > "$out/stdout" 2>> "$out/log"; then
    tail -n 1 "$out/stdout" | grep '^{' >> "$out/lines.jsonl"
  else
    failed+=("$* (status $?)")
  fi
  cat "$out/stdout" >> "$out/log"
  rm "$out/stdout"
  echo "($((SECONDS - begun)) s)" | tee -a "$out/log"
}

# steps SECONDS FLAGS ..: the flags of train.py in quotes, then flags of tools.bench train
steps() {
  measure "$1" python -m tools.bench train "${@:2}" --device "$device" --kernels 60
}

attention() {
  measure "$1" python -m tools.bench attend --preset 4b --device "$device" --dtype bfloat16 "${@:2}"
}

train() {
  steps 90 "--stage 1 --preset 4b --batch 64 --micro-batch 4" --gpus 8 --rounds 1
  steps 90 "--stage 1 --preset 4b --batch 64 --micro-batch 2 --recompute 0" --gpus 8 --rounds 1
  steps 180 "--stage 2 --preset 4b --batch 8 --micro-batch 1" --gpus 8 --rounds 1
  steps 120 "--stage 3 --preset 8b --batch 1 --cp 8" --gpus 8 --rounds 1
}

attend() {
  attention 90 --tokens 2560 16384 36864 --rows 4 --rounds 3
  measure 30 python - "$device" << 'END'
import json, sys
import torch
import attention
from tools.bench.attend import rows
from tools.bench.measure import clock

device = torch.device(sys.argv[1])
row, = rows(36864, 1, device)
mask = attention.block_mask(row.visible_until, row.bidir)
q = torch.randn(1, 36864, 32, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(1, 36864, 8, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
seconds = []
for _ in range(10):
    start = clock(device)
    moved = [attention.Reorder.apply(x, *mask.keys) for x in (q, k, k, q)]  # q, k, v, output
    torch.autograd.grad(moved, (q, k), moved)
    seconds.append(clock(device) - start)
print(json.dumps({"bench": "order", "tokens": 36864, "seconds": min(seconds)}))
END
}

before() {
  cd "${BEFORE:?must be a folder with the code of commit ed0357c}" || exit 2
  steps 100 "--stage 1 --preset 4b --batch 64 --micro-batch 4" --gpus 8 --steps 2
  steps 160 "--stage 2 --preset 4b --batch 32 --micro-batch 1" --gpus 8 --steps 2
  steps 110 "--stage 3 --preset 8b --batch 4 --cp 8" --gpus 8 --steps 2
  attention 90 --tokens 2560 16384 36864 --rows 4 --rounds 3
  cd - > /dev/null
}

tests() {
  measure 240 python -m pytest -m cuda -q -rsf
}

toy() {
  measure 240 python train.py --stage 1 --tiny --device "$device" --out "$out/toy" --json
}

lora() {
  steps 90 "--stage 2 --preset 4b --lora 16 --micro-batch 1 --batch 8 --data.max_tokens=2560" \
    --rounds 1
}

answer() {
  measure 120 python - "$device" << 'END'
import json, statistics, sys
from itertools import pairwise
import numpy as np
import torch
import model as models
from evaluation.generate import generate
from tools.bench.measure import clock
from tools.bench.rows import random_examples, set_random_pixels

device = torch.device(sys.argv[1])
config = models.PRESETS["4b"]
torch.set_default_dtype(torch.bfloat16)
with device:
    model = models.Molmo2(config).init_weights().eval()
rng = np.random.default_rng(0)
prompts = random_examples(config, rng, [(300, 1)], n_frames=128)[:1]
set_random_pixels(prompts, config, rng)
for _ in range(2):  # the first answer is the warm-up
    times = [clock(device)]
    generate(model, prompts, -1, 64, on_token=lambda ids: times.append(clock(device)))
seconds = [end - start for start, end in pairwise(times)]
print(json.dumps({"bench": "answer", "tokens": len(prompts[0].tokens), "prefill": seconds[0],
                  "per token": statistics.median(seconds[1:])}))
END
}

load() {
  measure 90 python -m tools.bench load --device "$device" --rounds 1
}

[ $# -gt 0 ] || set -- train attend tests toy lora answer load
for group; do
  case $group in
    train | attend | before | tests | toy | lora | answer | load) "$group" ;;
    *) failed+=("there is no group $group") ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" | tee -a "$out/log"; exit 1; }
