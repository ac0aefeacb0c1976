"""Programs that use the training loop for something that is not in the paper.

    preferences.py    an objective of one's own: DPO on pairs of a chosen and a rejected answer
"""
