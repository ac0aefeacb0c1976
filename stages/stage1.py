"""Stage 1: captions and pointing (paper: training, Table 12; docs/molmo2.md 9.2, 10).

From a language model and SigLIP2, with a new connector. 32,000 steps of 128 rows of 2,560 tokens,
4 million rows, as in the released runs (docs/molmo2.md 16). `--data FOLDER` takes the published
mixture from FOLDER/pixmo-cap/records.jsonl and so on (docs/data_sets.md has the lines that make
these files). Other data is named file by file: --data captions.jsonl=0.6 points.jsonl=0.3
text.jsonl=0.1
"""

# (group, rate, [(rate of these members, their names), ..]); the members of a group share its rate
# by the square root of their sizes
MIXTURE = [
    ("captions", 0.6, [(1, "pixmo-cap")]),               # with one transcript each
    ("pointing", 0.3, [
        # the paper counts every image of these twice, with the points alone and with their number
        (2 ** 0.5, "pixmo-points-basic pixmo-points-high-frequency pixmo-count"),
        (1, "cosyn-point"),
    ]),
    ("text", 0.1, [(1, "tulu")]),
]

RECIPE = {
    "steps": 32_000,
    "batch": 128,
    "micro_batch": 4,
    "data.max_tokens": 2560,
    "pack_crops": 16,
    "data.max_crops": 8,
    "data.max_frames": 16,
    "lr.vit": 6e-6,
    "lr.connector": 2e-4,
    "lr.llm": 2e-5,
    "warmup.vit": 2000,
    "warmup.connector": 200,         # the new part warms up first
    "warmup.llm": 2000,
    "response_dropout": 0.1,         # only where the target has loss: captions are few and repeated
    "residual_dropout": 0.0,
    "save_every": 2000,              # at many GPUs a save takes as long as 25 steps
    "freeze_embedding": True,        # of the base vocabulary; the 128 extra ones learn with the
                                     # connector
}
