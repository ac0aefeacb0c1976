"""The changes that --tiny makes in the recipe of a stage: the toy model, and settings for a laptop.
RESULTS.md reports times and scores.
"""

# for every stage
RECIPE = {
    "preset": "toy",
    "steps": 2200,
    "vit": "toy",                    # a new model starts with the trained ViT of toy/weights
    "train": ("connector", "llm"),
    "eval_images": 100,
    "batch": 3,                      # with larger batches, the loss falls less in the same time
    "micro_batch": 6,                # upper limit; lowered to `batch` if that is smaller
    "pack_crops": 16,
    "recompute": 0.0,                # all activations fit in memory
    "crop_bucket": 1,                # no padding, because nothing is compiled
    "lr.vit": 5e-5,                  # used with --train vit,connector,llm
    "lr.connector": 4e-4,            # lower than for the decoder, which uses its output
    "lr.llm": 2.2e-3,
    "warmup.vit": 60,
    "warmup.connector": 60,
    "warmup.llm": 60,
    "response_dropout": 0.0,         # the toy never repeats an image
    "residual_dropout": 0.0,
    "freeze_embedding": False,       # there is no pre-trained language model
    "data.max_tokens": 512,
    "data.max_crops": 1,
    "data.high_res_share": 0.0,
    "data.multi_turn_share": 0.0,
    "data.length_hint": 0,           # no length in the prompts of captions in evaluation
}
# for stages 2 and 3, which start from the weights of the stage before (--init)
LATER = {
    "data.prefix_all": True,         # the toy is trained on styles, not on free questions
    "lr.llm": 2e-3,
}
STAGES = {
    1: {},
    2: LATER | {
        "steps": 2800,
        "batch": 2,
        "data.max_tokens": 1024,
        "pack_crops": 32,
        "data.max_frames": 6,
    },
    3: LATER | {
        "steps": 1200,
        "batch": 1,
        "data.max_tokens": 2048,
        "pack_crops": 64,
        "data.max_frames": 18,
        "lr.connector": 2e-4,        # with higher learning rates, stage 2 is forgotten
        "lr.llm": 5e-4,
    },
}
