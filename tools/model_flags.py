"""The flags of commands that run a model, and the model that they give."""

import torch

from evaluation.answer import load
from evaluation.generate import Sampling
from records.errors import explained
from tools.command import in_range, whole_number
from training.ranks import device_of_rank


def open_device(name):
    """-> torch.device (see device_of_rank). ValueError if torch cannot use the device."""
    with explained(f"--device {name}"):
        device = device_of_rank(name)
        torch.zeros(1, device=device)
    return device


def add_model(parser, seed_of="the sampling", model=None):
    """Adds the flags of a command that generates answers; `open_model` and `sampling` read them.
    model: the default of --model. If it is None, --model is required."""
    add = parser.add_argument
    add("--model", default=model, required=model is None, help=(
        f"a run directory, a released folder, or toy{' (default)' if model == 'toy' else ''}"))
    add("--device", default="cpu", help="cpu (default), cuda, mps (never tested), ..")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="dtype of the weights (default float32)")
    add("--temperature", type=in_range(float, 0), default=0.0, metavar="T", help=(
        "temperature of the sampling; 0: greedy decoding (default)"))
    add("--top-p", type=in_range(float, 0, 1), default=1.0, metavar="P", help=(
        "sample from the most probable tokens with total probability P (default 1: all tokens)"))
    add("--frequency-penalty", type=in_range(float, -2, 2), default=0.0, metavar="F", help=(
        "subtracted from a token's logit for each time it occurs in the answer (default 0)"))
    add("--seed", type=whole_number(0), default=0, help=f"seed of {seed_of} (default 0)")


def open_model(args):
    """Opens the model that the flags of add_model give -> Loaded. Raises the errors of load."""
    return load(args.model, open_device(args.device), getattr(torch, args.dtype))


def sampling(args):
    return Sampling(args.temperature, args.top_p, args.frequency_penalty, args.seed)
