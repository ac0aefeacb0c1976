"""What a run needs besides the model, in reading order:

config       all settings of a run, and the command line that sets them
ranks        the processes of a run, and the communication between them
sources      the record files of a run, and their sampling rates
planner      decides which packs form a step
loader       decodes the packs of a step ahead of time
checkpoint   the run directory: saving and restoring a run
log          counts and losses of each step, and log.jsonl
setup        opens everything that a run starts with
"""
