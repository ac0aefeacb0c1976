"""Converts models between the format of this project and the format of Hugging Face.

    python -m tools.hf export toy runs/toy-hf

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

COMMANDS = {  # name: (sentence, folders of the example, {argument: (metavar, help)})
    "import": ("Converts a released checkpoint to a folder of this project.",
               "Molmo2-4B runs/molmo2-4b",
               {"source": ("HF_DIR", "a released checkpoint"),
                "out": ("OUT", "the folder to write")}),
    "base": ("Joins a language model and a vision model to the model that stage 1 starts from.",
             "Qwen3-8B siglip2-so400m-patch14-384 runs/base-8b",
             {"source": ("LLM_DIR", "Qwen3, OLMo-3 or SmolLM2"),
              "siglip": ("SIGLIP_DIR", "SigLIP or SigLIP 2"),
              "out": ("OUT", "the folder to write")}),
    "export": ("Converts a model of this project to the format of a released checkpoint.",
               "toy runs/toy-hf",
               {"source": ("MODEL", "a run directory, a folder of this project, or toy"),
                "out": ("HF_DIR", "the folder to write")}),
}


@report_errors
def main(argv=None):
    parser = make_parser("hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (sentence, example, folders) in COMMANDS.items():
        text = f"{sentence}\n\n    python -m tools.hf {name} {example}"
        command = commands.add_parser(name, help=sentence, description=text)
        for folder, (metavar, about) in folders.items():
            command.add_argument(folder, metavar=metavar, help=about)
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
