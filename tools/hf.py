"""Converts models between the format of this project and the format of Hugging Face.

    python -m tools.hf export toy runs/toy-hf

The last line on stdout is a JSON object with the folder and the numbers of tensors and parameters.
"""

from contextlib import contextmanager
from pathlib import Path

import torch

from data import DataConfig
from records.errors import import_extra, warn
from text.tokenizer import ByteTokenizer
from tools.command import MARK, make_parser, own_folder, print_line, report_errors
from weights import files
from weights.base import extended_tokenizer, start_from_base
from weights.export import export, require_exportable
from weights.files import RELEASED_SETTINGS, open_model_folder

OUT = ("out", "OUT", "the folder to write")
COMMANDS = {  # name: (sentence, folders of the example, (argument, metavar, help) of each folder)
    "import": ("Converts a released checkpoint to a folder of this project.",
               "Molmo2-4B runs/molmo2-4b",
               [("source", "HF_DIR", "a released checkpoint"), OUT]),
    "base": ("Joins a language model and a vision model to the model that stage 1 starts from.",
             "Qwen3-8B siglip2-so400m-patch14-384 runs/base-8b",
             [("source", "LLM_DIR", "Qwen3, OLMo-3 or SmolLM2"),
              ("siglip", "SIGLIP_DIR", "SigLIP or SigLIP 2"), OUT]),
    "export": ("Converts a model of this project to the format of a released checkpoint.",
               "toy runs/toy-hf",
               [("source", "MODEL", "a run directory, a folder of this project, or toy"), OUT]),
}


@contextmanager
def new_folder(out):
    """Makes the folder `out`, which is marked until it is complete. Removes what a killed command
    has left in it, and after an error all files and folders that were made. UserError as in
    own_folder."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with own_folder(out, "tools.hf"):
        remove_files(out)
        try:
            yield
        except BaseException:  # Ctrl-C too
            remove_files(out)
            (out / MARK).unlink()
            for folder in made:
                folder.rmdir()
            raise
        (out / MARK).unlink()


def remove_files(folder):
    for path in folder.iterdir():
        if path.name != MARK:
            path.unlink()


@report_errors
def main(argv=None):
    parser = make_parser("hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (sentence, example, folders) in COMMANDS.items():
        text = f"{sentence}\n\n    python -m tools.hf {name} {example}"
        command = commands.add_parser(name, help=sentence, description=text)
        for folder, metavar, about in folders:
            command.add_argument(folder, metavar=metavar, help=about)
        if name == "export":
            command.add_argument("--dtype", choices=("float32", "bfloat16"),
                                 help="dtype of the weights (default: the stored dtype)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    # stop early, before the weights are read
    dtype = None
    if args.command == "export":
        require_exportable(files.describe(args.source).config)
        dtype = args.dtype and getattr(torch, args.dtype)
    with new_folder(out):
        if args.command == "base":
            import_extra("tokenizers")
            model = start_from_base(args.source, args.siglip)
            tokenizer = extended_tokenizer(args.source, model.config.n_vocab)
            # the released models were trained with 24 crops, but this model was not
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
        warn("the byte tokenizer of the toy is not exported, only weights and settings are; "
             "to run the toy, use its run directory")
    elif args.command == "export":
        warn(f"to serve the exported model with vLLM (never tested here): vllm serve {args.out}")
    params = sum(p.numel() for p in model.parameters())
    print_line({"out": args.out, "tensors": len(model.state_dict()), "params": params})


if __name__ == "__main__":
    main()
