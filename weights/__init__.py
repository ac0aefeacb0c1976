"""Model folders in and out, for training, evaluation and the tools.

    files.py       our own folders and released ones: describe, load, save; a sharded model whole
    released.py    the layout of released checkpoints: names of tensors, config.json -> ModelConfig
    export.py      a model -> a released folder, which transformers and vLLM load
    base.py        a base language model and SigLIP 2 -> what stage 1 starts from
    lora.py        low-rank adapters on the decoder, and merging them
"""
