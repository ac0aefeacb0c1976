"""Stage 2: instruction tuning on everything (paper: training, Table 12; spec 9.2, 10).

From the weights of stage 1 (--init). 30,000 steps of 128 rows of 16,384 tokens. Loss weights give short answers and
images with many questions their say: 2 / sqrt(tokens) and 1 / sqrt(branches), pointing and counting flat 0.2.
"""

RECIPE = {
    "steps": 30_000,
    "batch": 128,
    "micro_batch": 2,
    "data.max_tokens": 16_384,
    "pack_crops": 128,
    "data.max_crops": 8,
    "data.max_frames": 128,
    "lr.vit": 5e-6, "lr.connector": 5e-6, "lr.llm": 1e-5,
    "warmup.vit": 200, "warmup.connector": 200, "warmup.llm": 200,
    "response_dropout": 0.0,
    "residual_dropout": 0.1,         # at every position
    "freeze_embedding": True,
    "data.prefix_all": False,        # plain prompts for what people ask, "style:" for benchmarks
    "data.separator": ";",
    "data.root_length": True, "data.root_branches": True, "data.point_weight": 0.2,
}
