"""Released checkpoints and base models in, released checkpoints out.

    python -m tools.hf import Molmo2-4B runs/molmo2-4b
    python -m tools.hf base Qwen3-8B siglip2-so400m-patch14-384 runs/base-8b
    python -m tools.hf export runs/mine mine-hf

import    a released folder -> a folder of this project (all commands read both)
base      Qwen3, OLMo-3 or SmolLM2, and SigLIP or SigLIP 2 -> what stage 1 starts from
export    a run directory or a folder of this project -> a released folder

The last line on stdout is a JSON object: the folder, and how many tensors and parameters.
"""

import json
from pathlib import Path

from data import DataConfig
from records.errors import warn
from text.tokenizer import ByteTokenizer
from tools.command import make_parser, report_errors
from weights import files
from weights.base import extended_tokenizer, start_from_base
from weights.export import export
from weights.files import RELEASED_SETTINGS, open_model_folder

FOLDERS = {  # arguments of each command
    "import": {"source": "HF_DIR", "out": "OUT"},
    "base": {"source": "LLM_DIR", "siglip": "SIGLIP_DIR", "out": "OUT"},
    "export": {"source": "MODEL", "out": "HF_DIR"},
}


@report_errors
def main(argv=None):
    parser = make_parser("hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, folders in FOLDERS.items():
        command = commands.add_parser(name)
        for folder, metavar in folders.items():
            command.add_argument(folder, metavar=metavar)
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out}: not empty; name another folder")
    if args.command == "base":
        model = start_from_base(args.source, args.siglip)
        tokenizer = extended_tokenizer(args.source, model.config.n_vocab)
        data_config = DataConfig(**RELEASED_SETTINGS)
    else:
        model, tokenizer, data_config = open_model_folder(args.source, dtype=None)
    if args.command == "export":
        export(model, tokenizer, data_config, args.out)
        if isinstance(tokenizer, ByteTokenizer):
            warn("the byte tokenizer of the toy is not exported, only weights and "
                 "settings; ask the toy by its run directory")
    else:
        files.save(model, args.out)
        tokenizer.save(args.out)
        files.save_data_config(data_config, args.out)
    params = sum(p.numel() for p in model.parameters())
    print(json.dumps({"out": args.out, "tensors": len(model.state_dict()), "params": params}))


if __name__ == "__main__":
    main()
