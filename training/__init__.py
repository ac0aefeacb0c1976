"""What a run needs besides the model, in reading order:

config       all settings of a run, and the command line that sets them
ranks        the processes of a run, and what they tell each other
sources      the record files of a run and their rates
planner      which packs form a step
loader       the packs of a step, decoded ahead
preferences  pairs of answers, one preferred: their loss, and the reference of the loss
checkpoint   the directory of a run, saving and restoring
log          the numbers of a step, log.jsonl
setup        opens everything a run starts with
"""
