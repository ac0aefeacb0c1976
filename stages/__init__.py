"""The training recipes as commented data (paper: training, Table 12): stage1, stage2, stage3, and
tiny, which makes them smaller. RECIPE contains fields of training.config.Config. MIXTURE lists the
published data sets with their sampling weights.
"""
