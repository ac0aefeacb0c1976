"""Trains a ViT on images of the toy world, and writes a model folder with it.

    python -m tools.vit runs/vit --steps 20

`train.py --stage 1 --tiny --vit runs/vit` then starts with this ViT. Without --vit, it starts with
the ViT of toy/weights. The rest of the model in the folder has random weights. The last line is
one JSON object: the loss of each task in the last step, in nats.
"""

import torch
from tqdm import tqdm

import model as models
from text.tokenizer import ByteTokenizer
from tools.command import make_parser, own_folder, positive, print_line, report_errors, whole_number
from tools.model_flags import open_device
from toy.vit import init_neighbor_heads, pretrain
from toy.world import WORDS
from weights import files


@report_errors
def main(argv=None):
    parser = make_parser("vit", __doc__)
    add = parser.add_argument
    add("out", help="new folder for config.json, model.pt and tokenizer.json")
    add("--steps", type=positive, default=1500, help="number of steps (default 1500)")
    add("--seed", type=whole_number(0), default=0,
        help="seed of the images and of the initial weights (default 0)")
    add("--device", default="cpu", help="cpu (default), cuda, ..")
    args = parser.parse_args(argv)
    torch.set_flush_denormal(True)  # as in train.py
    torch.manual_seed(args.seed)
    model = models.Molmo2(models.PRESETS["toy"]).init_weights()
    vit = model.vision.vit
    init_neighbor_heads(vit)
    vit.to(open_device(args.device))
    with own_folder(args.out, "tools.vit"):
        steps = tqdm(pretrain(vit, args.seed, args.steps), total=args.steps, unit="step")
        for line in steps:
            steps.set_postfix(line["nll"])
        files.save(model, args.out)
        ByteTokenizer(WORDS).save(args.out)
    print_line({"out": args.out, **line})


if __name__ == "__main__":
    main()
