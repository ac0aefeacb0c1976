"""What --tiny changes of a stage's recipe: the toy model and settings for a laptop.

Times and scores are in RESULTS.md.
"""

# of every stage
RECIPE = {
    "preset": "toy",
    "steps": 2200,
    "vit_steps": 1500,               # stage 0 (toy/vit.py)
    "train": ("connector", "llm"),   # stage 0 has taught the ViT
    "eval_images": 100,
    "batch": 3,                      # a larger batch learns less in the same time
    "micro_batch": 6,                # at most: it is lowered to the batch
    "pack_crops": 16,
    "activation_checkpointing": False,                   # all activations fit
    "crop_bucket": 1,                # nothing is compiled for a shape
    "lr.vit": 5e-5,                  # with --train vit,connector,llm
    "lr.connector": 4e-4,            # slower than the decoder, which reads its tokens
    "lr.llm": 2.2e-3,
    "warmup.vit": 60,
    "warmup.connector": 60,
    "warmup.llm": 60,
    "response_dropout": 0.0,         # no image is repeated
    "residual_dropout": 0.0,
    "freeze_embedding": False,       # there is no pre-trained language model to keep
    "data.max_tokens": 512,
    "data.max_crops": 1,
    "data.high_res_share": 0.0,
    "data.multi_turn_share": 0.0,
    "data.length_hint": 0,           # in evaluation: captions are asked for without a number
}
# of stages 2 and 3, which begin with the weights of the stage before (--init)
LATER = {
    "data.prefix_all": True,         # the toy knows styles, not the many ways to ask
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
        "lr.connector": 2e-4,        # higher rates unlearn stage 2
        "lr.llm": 5e-4,
    },
}
