"""Reads and writes model folders, for training, evaluation and the tools.

    files.py       loads our own and released folders, saves ours, and gathers sharded models
    released.py    the layout of released checkpoints: names of tensors, config.json -> ModelConfig
    export.py      writes a model as a released folder, which transformers and vLLM load
    base.py        builds the model before stage 1 from a base language model and SigLIP 2
    lora.py        adds low-rank adapters to the decoder, and merges them
"""
