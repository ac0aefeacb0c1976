"""Which values the fields of a Config may have.

The bounds refuse what trains in the wrong direction (a negative learning rate), what is no number
(NaN, infinity) and what no machine can hold; not what is unusual.
"""

from model import PRESETS
from records.media import MAX_FRAMES
from stages.recipes import STAGES
from toy.shapes import KINDS_BY_NAME
from weights.lora import LAYERS

MANY = 10**9                 # more steps or records than any run has

# (least, greatest, fields): both bounds are allowed; of a tuple they hold for each number
BOUNDS = (
    (1, max(STAGES), "stage"),
    (1, MANY, "steps batch micro_batch pool_size eval_images model.yarn.original_max"),
    (0, MANY, "warmup.vit warmup.connector warmup.llm vit_steps save_every keep"),
    (0, MANY, "data.max_points data.n_transcripts data.length_hint"),
    (0, 1, "lr.vit lr.connector lr.llm final_lr z_loss max_skip"),
    (0, 0.999999, "betas"),
    (1e-16, 1, "adam_eps model.eps model.vision.eps"),
    (0, 10**5, "lora.rank"),
    (1e-6, 1e6, "lora.alpha"),
    (1e-6, 1e9, "clip"),                                   # 1e9: never clip
    (0, 0.99, "residual_dropout response_dropout"),        # what is kept is divided by 1 - p
    (0, 2**64 - 1, "seed"),                                # the largest that torch takes
    (0, 1024, "workers"),
    (1, 10**5, "cp"),
    (0, 10**5, "shard"),
    (1, 10**4, "pack_crops data.max_images"),
    (1, 1024, "crop_bucket data.max_crops"),
    (1, 2**20, "data.max_tokens"),
    (1, MAX_FRAMES, "data.max_frames"),
    (1e-3, 1000, "data.fps"),
    (0, 1000, "data.point_weight data.video_caption_weight uncheckpointed_blocks"),
    (1, 1000, "model.n_layer model.vision.n_layer"),
    (0, 999, "model.yarn.layers model.vision.feature_layers"),
    (1, 10**6, "model.n_embd model.n_hidden model.vision.n_embd model.vision.n_hidden"),
    (1, 1024, "model.n_head model.n_kv_head model.head_dim model.vision.n_head"),
    (369, 10**7, "model.n_vocab"),                         # the byte tokenizer with the toy's words
    (10, 10**4, "model.n_extra"),                          # the special tokens of text/tokenizer.py
    (1, 1e12, "model.rope_theta"),
    (1e-3, 1e4, "model.yarn.factor model.yarn.attention_factor"),
    (1e-3, 1e4, "model.yarn.beta_fast model.yarn.beta_slow"),
    (0, 10, "model.init_std"),
    (1, 256, "model.vision.grid model.vision.patch"),
    (0, 127, "model.vision.overlap_margin"),
)
RANGES = {}
for least, greatest, names in BOUNDS:
    RANGES |= dict.fromkeys(names.split(), (least, greatest))

CHOICES = {
    "preset": tuple(PRESETS),
    "train": ("vit", "connector", "llm"),
    "dry_run": ("auto", "true", "false"),
    "toy_kinds": tuple(KINDS_BY_NAME),
    "on_nonfinite": ("stop", "skip"),
    "device": ("auto", "cpu", "cuda", "mps"),
    "dtype": ("auto", "float32", "bfloat16"),
    "frozen_dtype": ("auto", "float32"),
    "lora.layers": LAYERS,
    "model.family": ("qwen", "olmo", "llama"),
}


def broken_rule(name, values):
    """What the field `name` must be, if one of `values` is not; else an empty string."""
    least, greatest = RANGES.get(name, (None, None))
    if name in RANGES and not all(least <= value <= greatest for value in values):   # nor is NaN
        return f"must be between {least} and {greatest}"
    if name in CHOICES and not set(values) <= set(CHOICES[name]):
        return f"choose from {', '.join(CHOICES[name])}"
    return ""
