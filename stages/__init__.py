"""The recipes of training as commented data (paper: training, Table 12).

stage1, stage2, stage3, and tiny, which shrinks them. RECIPE holds fields of training.config.Config,
MIXTURE names the published data.
"""
