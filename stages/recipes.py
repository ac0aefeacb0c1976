"""The stages of training by their numbers (paper: training, Table 12): a file for each, with the
RECIPE, its fields of training.config.Config, and the MIXTURE of published data that it reads."""

from stages import stage1, stage2, stage3

STAGES = {1: stage1, 2: stage2, 3: stage3}
