"""What --tiny changes of a stage's recipe: the toy model and settings for a laptop (8 minutes on 2 cores, scores in RESULTS.md)."""

# what --tiny changes of any stage's recipe; with it: 8 minutes on 2 cores, scores in RESULTS.md
RECIPE = {
    "preset": "toy", "steps": 3200, "vit_steps": 1000,
    "batch": 3, "micro_batch": 6,    # a larger batch learns less in the same time
    "pack_crops": 16,
    "activation_checkpointing": False,              # everything fits
    "crop_bucket": 1,                # nothing is compiled here: no need for few shapes
    "lr.vit": 5e-5, "lr.connector": 1e-3, "lr.llm": 1e-3,                 # the ViT can see already, the rest starts from nothing
    "warmup.vit": 60, "warmup.connector": 60, "warmup.llm": 60,
    "response_dropout": 0.0, "residual_dropout": 0.0,                     # no image comes twice
    "freeze_embedding": False,       # there is no language model to keep
    "data.max_tokens": 512, "data.max_crops": 1, "data.length_hint": 0,
}
# and what it changes of stages 2 and 3 alone: they begin where the stage before ended (--init)
LATER = {
    "data.prefix_all": True,         # the toy knows its styles, not the many ways to ask
    "train": "connector,llm",        # the ViT can see: it rests, for a third of the time
    "lr.connector": 1e-3, "lr.llm": 1e-3,
}
STAGES = {
    1: {},
    2: {**LATER, "steps": 4000, "batch": 2, "data.max_tokens": 1024, "pack_crops": 32, "data.max_frames": 6},
    3: {**LATER, "steps": 2000, "batch": 1, "data.max_tokens": 2048, "pack_crops": 64, "data.max_frames": 18,
        "lr.connector": 5e-4, "lr.llm": 5e-4},           # more unlearns what stage 2 taught
}
