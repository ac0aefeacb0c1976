#!/usr/bin/env bash
# Measures one GPU of 141 GB (docs/gpu.md). Runs the named groups of commands, one after the other.
# Without names, it runs all groups:
#
#   bash docs/bench/gpu.sh runs/gpu stage1 stage3 attend
#
# The first argument is a folder. The last line that a command prints is JSON, and is appended to
# after.jsonl in this folder. All output is appended to log. If BEFORE is a folder with the code of
# commit ed0357c, that code is measured as well, and its lines are appended to before.jsonl. A
# command that fails, or that takes longer than its limit, does not stop the others. The last lines
# that the script prints name it.
#
#   group     expected seconds (with BEFORE), and what is measured
#   stage1    120 (200)  steps of stage 1 as one rank of 8, with and without recomputed blocks
#   stage2    240 (370)  the same for stage 2; at least 30 % of the blocks must be computed again
#   stage3    240 (350)  the same for stage 3, with the rows shared by 8 ranks
#   attend     80 (150)  attention beside a dense mask, a loop and a causal mask; reordering tokens
#   toy       160        train.py --stage 1 --tiny, with its scores
#   lora       70        steps with LoRA
#   answer     60        seconds of the first token after 128 frames, and of each later token
#   load       60        seconds in which a video is decoded
#   tests     300        the tests that need a GPU
set -uo pipefail

out=$(realpath -m "${1:?the first argument is a folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.." || exit 2
after=$PWD
before=${BEFORE:+$(realpath -e "$BEFORE")} || exit 2
device=${DEVICE:-cuda}
failed=()

# run SECONDS COMMAND ..: with a limit; its output is also in $out/stdout
run() {
  local limit=$1 begun=$SECONDS
  shift
  echo "=== $PWD: $*" | tee -a "$out/log"
  # torchrun needs 30 seconds to end its processes
  timeout -k 40 "$limit" "$@" 2>> "$out/log" | tee -a "$out/log" > "$out/stdout" ||
    failed+=("$PWD: $*")
  echo "($((SECONDS - begun)) s)" | tee -a "$out/log"
}

# measure SECONDS COMMAND ..: the same, for a command that prints a line of JSON
measure() {
  local lines=after
  [ "$PWD" = "$after" ] || lines=before
  run "$@"
  tail -n 1 "$out/stdout" | grep '^{' >> "$out/$lines.jsonl" || failed+=("no JSON: ${*:2}")
}

# steps SECONDS FLAGS ..: the flags of train.py in quotes, then flags of tools.bench train
steps() {
  measure "$1" python -m tools.bench train "${@:2}" --device "$device" --kernels 60
}

attention() {
  for tokens in 2560 16384 36864; do
    measure 60 python -m tools.bench attend --preset 4b --dtype bfloat16 --device "$device" \
      --tokens $tokens --rows 4 --rounds 3
  done
}

# in_before COMMAND ..: in the folder of the older code, if there is one
in_before() {
  [ -z "$before" ] || { cd "$before" && "$@"; cd "$after"; }
}

stage1() {
  local flags="--stage 1 --preset 4b --batch 64"
  steps 120 "$flags --micro-batch 4" --gpus 8 --rounds 1
  in_before steps 120 "$flags --micro-batch 4" --gpus 8 --steps 2
  steps 120 "$flags --micro-batch 2 --recompute 0" --gpus 8 --rounds 1
  in_before steps 120 "$flags --micro-batch 2 --activation_checkpointing=false" --gpus 8 --steps 2
}

stage2() {
  local flags="--stage 2 --preset 4b --micro-batch 1"
  steps 180 "$flags --batch 8" --gpus 8 --rounds 1
  in_before steps 180 "$flags --batch 32" --gpus 8 --steps 2
  steps 180 "$flags --batch 8 --recompute 0.3" --gpus 8 --rounds 1
}

stage3() {
  local flags="--stage 3 --preset 8b --cp 8"
  steps 180 "$flags --batch 1" --gpus 8 --rounds 1
  in_before steps 180 "$flags --batch 4" --gpus 8 --steps 2
  steps 180 "$flags --batch 1 --recompute 0" --gpus 8 --rounds 1
}

attend() {
  attention
  in_before attention
  measure 30 python - "$device" << 'END'
import json, sys
import torch
import attention
from tools.bench.attend import rows
from tools.bench.measure import clock
from training.log import commit, hardware

T = 36864
device = torch.device(sys.argv[1])
row, = rows(T, 1, device)
mask = attention.block_mask(row.visible_until, row.bidir)
q, k = (torch.randn(1, T, n, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (32, 8))
seconds = []
for _ in range(10):
    start = clock(device)
    moved = [attention.Reorder.apply(x, *mask.keys) for x in (q, k, k, q)]  # q, k, v, the output
    torch.autograd.grad(moved, (q, k), moved)
    seconds.append(clock(device) - start)
print(json.dumps({"bench": "order", "tokens": T, "seconds": min(seconds),
                  "hardware": hardware(device), "commit": commit()}))
END
}

toy() {
  measure 240 python train.py --stage 1 --tiny --device "$device" --out "$(mktemp -d)/toy" --json
}

lora() {
  steps 120 "--stage 2 --preset 4b --lora 16 --micro-batch 1 --batch 8 --data.max_tokens=2560" \
    --rounds 1
}

answer() {
  measure 120 python - "$device" << 'END'
import json, statistics, sys
from functools import partial
from itertools import pairwise
import numpy as np
import torch
import model as models
from evaluation.generate import generate
from tools.bench.measure import clock
from tools.bench.rows import random_examples, set_random_pixels
from tools.bench.train import time_kernels
from training.log import commit, hardware

device = torch.device(sys.argv[1])
config = models.PRESETS["4b"]
with device:
    model = models.Molmo2(config).init_weights()
model = model.to(torch.bfloat16).eval()
rng = np.random.default_rng(0)
prompts = random_examples(config, rng, [(300, 1)], n_frames=128)[:1]
set_random_pixels(prompts, config, rng)
for _ in range(2):  # the first answer is the warm-up
    times = [clock(device)]
    generate(model, prompts, -1, 64, on_token=lambda ids: times.append(clock(device)))
first, *later = [end - start for start, end in pairwise(times)]
kernels = [sum(time_kernels(partial(generate, model, prompts, -1, n), device).values())
           for n in (1, 33)]
print(json.dumps({"bench": "answer", "tokens": len(prompts[0].tokens), "first token": first,
                  "later token": statistics.median(later), "first token, kernels": kernels[0],
                  "later token, kernels": (kernels[1] - kernels[0]) / 32,
                  "hardware": hardware(device), "commit": commit()}))
END
}

load() {
  measure 90 python -m tools.bench load --device "$device" --rounds 1
}

tests() {
  run 180 python -m pytest -v -rf tests/test_cuda.py -k "not two_ranks"
  run 240 python -m pytest -v -rf tests/test_cuda.py -k two_ranks
}

[ $# -gt 0 ] || set -- stage1 stage2 stage3 attend toy lora answer load tests
for group; do
  case $group in
    stage1 | stage2 | stage3 | attend | toy | lora | answer | load | tests) "$group" ;;
    *) failed+=("there is no group $group") ;;
  esac
done
rm -f "$out/stdout"
[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" | tee -a "$out/log"; exit 1; }
