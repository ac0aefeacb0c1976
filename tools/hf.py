"""Converts models between the format of this project and the format of Hugging Face.

    python -m tools.hf export toy runs/toy-hf

The last line on stdout is a JSON object: the folder, and how many tensors and parameters.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch

from data import DataConfig
from records.errors import warn
from text.tokenizer import ByteTokenizer
from tools.command import make_parser, report_errors
from weights import files
from weights.base import extended_tokenizer, start_from_base
from weights.export import export, require_exportable
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


@contextmanager
def empty_again_after_an_error(out):
    """Makes a folder. After an error it removes what was written there, and the folders it made."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # Ctrl-C too
        for path in list(out.iterdir()):
            path.unlink()
        for folder in made:
            folder.rmdir()
        raise


@report_errors
def main(argv=None):
    parser = make_parser("hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (sentence, example, folders) in COMMANDS.items():
        text = f"{sentence}\n\n    python -m tools.hf {name} {example}"
        command = commands.add_parser(name, help=sentence, description=text)
        for folder, (metavar, about) in folders.items():
            command.add_argument(folder, metavar=metavar, help=about)
        if name == "export":
            command.add_argument("--dtype", choices=("float32", "bfloat16"),
                                 help="of the weights (default: as they are stored)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out}: not empty; name another folder")
    # what is known early is said before the weights are read
    dtype = None
    if args.command == "export":
        require_exportable(files.describe(args.source).config)
        dtype = args.dtype and getattr(torch, args.dtype)
    with empty_again_after_an_error(out):
        if args.command == "base":
            files.import_extra("tokenizers")
            model = start_from_base(args.source, args.siglip)
            tokenizer = extended_tokenizer(args.source, model.config.n_vocab)
            # unlike a released model, it was not trained with 24 crops
            data_config = DataConfig(**RELEASED_SETTINGS | {"high_res_share": 0})
        else:
            model, tokenizer, data_config = open_model_folder(args.source, dtype=dtype)
        if args.command == "export":
            export(model, tokenizer, data_config, out)
        else:
            files.save(model, out)
            tokenizer.save(out)
            files.save_data_config(data_config, out)
    if args.command == "export" and isinstance(tokenizer, ByteTokenizer):
        warn("the byte tokenizer of the toy is not exported, only weights and settings; "
             "run the toy from its run directory")
    params = sum(p.numel() for p in model.parameters())
    print(json.dumps({"out": args.out, "tensors": len(model.state_dict()), "params": params}))


if __name__ == "__main__":
    main()
