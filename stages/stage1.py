"""Stage 1: captions and pointing (paper: training, Table 12; docs/molmo2.md 9.2, 10).

The training starts from a language model, SigLIP2 and a new connector. It has 32,000 steps of 128
packed rows of 2,560 tokens, like the released runs (docs/molmo2.md 16). `--data FOLDER` reads the
published mixture from FOLDER/pixmo-cap/records.jsonl and so on. docs/data_sets.md shows how to make
these files. For other data, list the files with their sampling weights: --data captions.jsonl=0.6
points.jsonl=0.3 text.jsonl=0.1
"""

# (group, its sampling weight, [(factor, data sets), ..]). The weight of a group is distributed over
# its data sets in proportion to factor x sqrt(number of records).
MIXTURE = [
    ("captions", 0.6, [(1, "pixmo-cap")]),               # one transcript per image
    ("pointing", 0.3, [
        # sqrt(2): in the paper every image is two examples, for points and for points with count
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
    "warmup.connector": 200,         # short, because the connector is new
    "warmup.llm": 2000,
    "response_dropout": 0.1,         # only at targets with loss, because captions are few
    "residual_dropout": 0.0,
    "save_every": 2000,              # a save stops all GPUs; its time was not measured on many
    "freeze_embedding": True,        # the base vocabulary; the 128 extra embeddings are trained
}
