"""Stage 3: long context (paper: long-context training, Table 12; docs/molmo2.md 10).

The training starts from the weights of stage 2 with a new optimizer. It has 2,000 steps of the
recipe of stage 2, with packed rows of 36,864 tokens and 384 crops. In the paper, groups of 8 GPUs
share a row (--cp 8, see stages/cluster.sh). For evaluation, the number of frames is set separately
(tools.generate --frames; paper: appendix E, Figure 7).
"""

from stages import stage2

MIXTURE = stage2.MIXTURE
RECIPE = stage2.RECIPE | {
    "steps": 2_000,
    "save_every": 50,                # a step takes minutes
    "micro_batch": 1,
    "data.max_tokens": 36_864,
    "pack_crops": 384,
    "data.max_frames": 384,
}
