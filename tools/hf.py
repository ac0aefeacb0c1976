"""Released checkpoints and base models in, released checkpoints out.

    python -m tools.hf import Molmo2-4B runs/molmo2-4b
    python -m tools.hf base Qwen3-8B siglip2-so400m-patch14-384 runs/base-8b
    python -m tools.hf export runs/mine mine-hf

import    a released folder -> a folder of this project (train.py and the tools read both)
base      Qwen3, OLMo-3 or SmolLM2, and SigLIP or SigLIP 2 -> what stage 1 starts from
export    a run directory or a folder of this project -> a folder for transformers and vLLM

The last line on stdout is a JSON object: the folder, tensors, parameters by group.
"""

import argparse
import json
from pathlib import Path

from data import DataConfig
from records.errors import warn
from text.tokenizer import ByteTokenizer
from weights import files
from weights.base import extended_tokenizer, start_from_base
from weights.export import export
from weights.files import RELEASED_SETTINGS, open_model_folder


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tools.hf", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("import", help="a released folder -> a folder of this project")
    command.add_argument("source", metavar="HF_DIR")
    command.add_argument("out", metavar="OUT")
    command = commands.add_parser("base", help="base models -> what stage 1 starts from")
    command.add_argument("source", metavar="LLM_DIR")
    command.add_argument("siglip", metavar="SIGLIP_DIR")
    command.add_argument("out", metavar="OUT")
    command.add_argument("--seed", type=int, default=0,
                         help="of the connector and the extra embeddings (default 0)")
    command = commands.add_parser("export", help="a run directory or a folder of this project -> "
                                  "a released folder")
    command.add_argument("source", metavar="MODEL")
    command.add_argument("out", metavar="HF_DIR")
    return parser.parse_args(argv)


def run(args):
    """-> the model that was written to args.out. OSError or ValueError in one sentence."""
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: not empty; name another folder")
    if args.command == "base":
        model = start_from_base(args.source, args.siglip, args.seed)
        tokenizer = extended_tokenizer(args.source, model.config.n_vocab)
        data_config = DataConfig(**RELEASED_SETTINGS)
    else:
        model, tokenizer, data_config = open_model_folder(args.source, dtype=None)
    if args.command == "export":
        export(model, tokenizer, data_config, out)
        if isinstance(tokenizer, ByteTokenizer):
            warn("the byte tokenizer of the toy is not exported, only weights and "
                 "settings; ask the toy by its run directory")
    else:
        files.save(model, out)
        tokenizer.save(out)
        files.save_data_config(data_config, out)
    return model


def main(argv=None):
    args = parse(argv)
    try:
        model = run(args)
    except (OSError, ValueError) as e:
        warn(str(e))
        raise SystemExit(2) from None
    groups = {name: sum(p.numel() for p in parameters)
              for name, parameters in model.parameter_groups().items()}
    print(json.dumps({"out": args.out, "tensors": len(model.state_dict()),
                      "params": sum(groups.values()), **groups}))


if __name__ == "__main__":
    main()
