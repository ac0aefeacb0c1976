"""Train Molmo2 (paper: training, Table 12; spec 7, 10).

    python train.py --stage 1 --tiny                                   # laptop: the toy world, no download
    python train.py --stage 1 --tiny --data my.jsonl --media photos    # laptop, own records
    python train.py --stage 1 --data captions.jsonl=0.6 points.jsonl=0.3 text.jsonl=0.1 --preset 4b --device cuda

Order of this file: config, command line, data, model, optimizer, loop, what is left behind. A step:

    packs -> Batch -> nll, lse per token -> sum(w * (nll + z * lse^2)) / (sum of w over the whole step) -> backward -> clip -> AdamW

The division by the weight of the whole step, never of a micro-batch, makes packing and accumulation invisible.
"""

import argparse
import dataclasses
import difflib
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

import data
import model as models
import packing
from data import DataConfig
from stages import tiny

# ---------------------------------------------------------------------------------------------------------------
# config


@dataclass(frozen=True)
class Parts:
    vit: float
    connector: float                 # with the 128 extra embeddings
    llm: float


@dataclass(frozen=True)
class Config:
    stage: int = 1
    preset: str = "4b"               # where `model` starts from
    steps: int = 31_000              # the schedule ends there
    batch: int = 128                 # packs per step, over everything
    micro_batch: int = 4             # packs per forward; the rest of the batch is accumulated
    pack_crops: int = 16             # crops of one pack
    pool: int = 48                   # examples the packer chooses from
    lr: Parts = Parts(6e-6, 2e-4, 2e-5)
    warmup: Parts = Parts(2000, 200, 2000)           # steps, linear from 0
    final_lr: float = 0.1            # the cosine ends at this share of the base rate
    betas: tuple = (0.9, 0.95)
    adam_eps: float = 1e-6
    clip: float = 1.0                # gradient norm, of each group by itself
    z_loss: float = 1e-4
    residual_dropout: float = 0.0    # at every position
    response_dropout: float = 0.1    # only where the target has loss
    freeze_embedding: bool = True    # the base embedding, and with it a tied head (spec 10)
    train: tuple = ("vit", "connector", "llm")
    crop_bucket: int = 8             # crops of a batch are padded to a multiple of this
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"              # of the arithmetic; weights and optimizer are float32 always
    workers: int = 0                 # processes that decode ahead; 0: the training process does it
    eval_images: int = 200           # held-out images asked about at the end of a toy run
    data: DataConfig = DataConfig()
    model: models.Config = models.PRESETS["4b"]


class UserError(Exception):
    """Ends the command with status 2 and one sentence."""


class RunError(Exception):
    """Ends the command with status 1 and one sentence: the run itself failed."""


def override(config, key, value, where):
    """config with one dotted field replaced; a string is parsed by the type of the field it replaces."""
    head, _, rest = key.partition(".")
    names = [f.name for f in dataclasses.fields(config)]
    if head not in names:
        near = difflib.get_close_matches(head, names, 1)
        hint = f" - did you mean '{near[0]}'?" if near else f"; there are {', '.join(names)}"
        raise UserError(f"{where}: no such field '{head}'{hint}")
    old = getattr(config, head)
    if dataclasses.is_dataclass(old):
        if not rest:
            raise UserError(f"{where}: '{head}' has fields of its own: {', '.join(f.name for f in dataclasses.fields(old))}")
        return replace(config, **{head: override(old, rest, value, where)})
    if rest:
        raise UserError(f"{where}: '{head}' has no field '{rest}'")
    if isinstance(value, str) and not isinstance(old, str):
        try:
            if isinstance(old, bool):
                value = {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            elif isinstance(old, tuple):
                value = tuple(type(old[0])(v) for v in value.split(",") if v)
            else:
                value = type(old)(float(value)) if isinstance(old, int) and float(value) == int(float(value)) else type(old)(value)
        except (KeyError, ValueError):
            raise UserError(f"{where}: '{value}' is no {type(old).__name__}") from None
    return replace(config, **{head: value})


def parse(argv):
    """Command line -> arguments, Config: defaults, then the stage's recipe, then --tiny's, then flags in their order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     epilog="Any field of the config: --a.b=value, e.g. --lr.vit=1e-4 --data.max_crops=4 --pool=64")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True, help="recipe from stages/")
    parser.add_argument("--tiny", action="store_true", help="toy model and laptop settings; toy world unless --data is given")
    parser.add_argument("--preset", choices=tuple(models.PRESETS), help="model shape (default: 4b, with --tiny toy)")
    parser.add_argument("--data", nargs="+", metavar="FILE[=rate]", help="record files (.jsonl) and their shares, default 1 each")
    parser.add_argument("--media", metavar="DIR", help="where the paths in the records start")
    parser.add_argument("--eval", metavar="FILE", help="records asked about at the end (with --data)")
    parser.add_argument("--init", metavar="DIR", help="start from the weights of a run directory")
    parser.add_argument("--out", metavar="DIR", help="run directory (default runs/stage1-tiny and so on; an old one is moved aside)")
    parser.add_argument("--steps", type=int, help="optimizer steps; the schedule ends there")
    parser.add_argument("--batch", type=int, help="packs per step, over everything")
    parser.add_argument("--micro-batch", type=int, help="packs per forward")
    parser.add_argument("--train", metavar="PARTS", help="which parts learn: vit,connector,llm (default all)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--workers", type=int, help="processes that decode ahead (default 0: none)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="arithmetic (auto: bfloat16 on a GPU, else float32)")
    parser.add_argument("--deterministic", action="store_true", help="dropout off, deterministic kernels")
    args, rest = parser.parse_known_args(argv)

    config = override(Config(), "stage", args.stage, "--stage")
    recipes = [importlib.import_module(f"stages.stage{args.stage}").RECIPE] + [tiny.RECIPE] * args.tiny
    for recipe in recipes:
        for key, value in recipe.items():
            config = override(config, key, value, "recipe")
    for key in ("preset", "steps", "batch", "micro_batch", "train", "seed", "workers", "device", "dtype"):
        if getattr(args, key) is not None:
            config = override(config, key, getattr(args, key), f"--{key.replace('_', '-')}")
    config = replace(config, model=models.PRESETS[config.preset])
    flags = [option[2:] for action in parser._actions for option in action.option_strings]
    for item in rest:
        key, equals, value = item.partition("=")
        if not key.startswith("--") or not equals:
            near = difflib.get_close_matches(key.lstrip("-"), flags, 1)
            hint = f" - did you mean --{near[0]}?" if near else "; config fields are written --a.b=value"
            raise UserError(f"{key}: no such flag{hint}")
        config = override(config, key[2:], value, key)
    config = replace(config, data=replace(config.data, vision=config.model.vision))
    if args.deterministic:
        config = replace(config, residual_dropout=0.0, response_dropout=0.0)
    # the batch of a laptop run may be smaller than the recipe's micro-batch
    config = replace(config, micro_batch=min(config.micro_batch, config.batch))
    for key in ("steps", "batch", "micro_batch", "pool", "crop_bucket"):
        if getattr(config, key) < 1:
            raise UserError(f"--{key.replace('_', '-')}: must be at least 1, not {getattr(config, key)}")
    if config.batch % config.micro_batch:
        raise UserError(f"--micro-batch {config.micro_batch}: --batch {config.batch} is no multiple of it")
    if not config.train or set(config.train) - {"vit", "connector", "llm"}:
        raise UserError(f"--train {','.join(config.train)}: choose among vit, connector, llm")
    return args, config


def run_directory(args, config):
    default = Path("runs") / f"stage{config.stage}{'-tiny' if args.tiny else ''}"
    out = Path(args.out) if args.out else default
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        if args.out:
            raise UserError(f"--out {out}: not empty; name another directory")
        n = 1
        while (aside := out.with_name(f"{out.name}.old-{n}")).exists():
            n += 1
        out.rename(aside)
    try:
        (out / "model").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: {e.strerror}") from None
    return out


# ---------------------------------------------------------------------------------------------------------------
# data


def open_sources(args, config):
    """-> sources, rates, tokenizer."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("torchrun: several processes cannot train one model yet; start train.py by itself")
    tokenizer = data.ByteTokenizer(tiny.WORDS, config.model.n_vocab)
    if args.data:
        sources, rates = [], []
        for item in args.data:
            path, rate = item, 1.0
            if "=" in item and not Path(item).exists():
                path, _, text = item.rpartition("=")
                try:
                    rate = float(text)
                except ValueError:
                    raise UserError(f"--data {item}: '{text}' is no rate") from None
                if not 0 < rate < math.inf:
                    raise UserError(f"--data {item}: a rate must be above 0")
            sources.append(data.Records(path, args.media))
            rates.append(rate)
        return sources, rates, tokenizer
    if not args.tiny:
        raise UserError("--data: name record files to train on (or --tiny for the toy world, which needs none)")
    return *tiny.mixture(config.seed), tokenizer


class Loader:
    """Steps of packs, in an order that depends on the seed alone.

    A record whose image cannot be opened, or of which nothing fits, is left out while planning; one that turns out
    bad while decoding keeps its place without loss. Both are counted in `dropped`; `bad` holds the latter.
    """

    def __init__(self, sources, rates, tokenizer, config):
        self.mixture = data.Mixture(sources, rates, config.seed)
        self.tokenizer, self.config = tokenizer, config
        self.dropped, self.warned, self.in_a_row = Counter(), set(), 0
        self.planner = packing.Planner(self.size, config.data.max_tokens, config.pack_crops, config.pool)
        self.bad = []

    def record(self, i):
        source, index, epoch = self.mixture[i]
        return self.mixture.sources[source][index], epoch

    def size(self, i):
        record, epoch = self.record(i)
        try:
            size = data.size(record, self.tokenizer, self.config.data, self.config.seed, epoch)
            reason = "" if size[0] else "S03 nothing of it fits a row" if size == (0, 0) else ""
        except data.Unreadable as e:
            size, reason = None, str(e)
        if size and (size[0] > self.config.data.max_tokens or size[1] > self.config.pack_crops):
            limits = f"{self.config.data.max_tokens} and {self.config.pack_crops}"
            reason = f"S03 {size[0]} tokens and {size[1]} crops do not fit a row of {limits}"
        if not reason:
            self.in_a_row = 0
            return size
        self.drop(record, reason)
        self.in_a_row += 1
        if self.in_a_row >= 100:
            raise UserError(f"100 records in a row could not be used; the last: {record['where']}: {reason}")
        return None

    def drop(self, record, reason):
        self.dropped[reason[:3]] += 1
        if record["where"] not in self.warned:
            self.warned.add(record["where"])
            tqdm.write(f"{record['where']}: {reason}; skipped", file=sys.stderr)

    def encode(self, i):
        record, epoch = self.record(i)
        return data.encode(record, self.tokenizer, self.config.data, self.config.seed, epoch)

    def __iter__(self):
        """Yields one step at a time: `batch` packs, each a list of data.Encoded."""
        steps = iter(lambda: [next(self.planner) for _ in range(self.config.batch)], None)
        if not self.config.workers:
            for packs in steps:
                yield self.checked(packs, [[self.encode(i) for i in pack] for pack in packs])
            return
        # two steps ahead, in plan order; what a worker decodes is a function of the number it is given
        needs = (self.mixture, self.tokenizer, self.config)
        with ProcessPoolExecutor(self.config.workers, get_context("spawn"), _start_worker, needs) as pool:
            ahead = deque()
            while True:
                while len(ahead) < 2:
                    packs = next(steps)
                    ahead.append((packs, [[pool.submit(_encode_in_worker, i) for i in pack] for pack in packs]))
                packs, futures = ahead.popleft()
                yield self.checked(packs, [[f.result() for f in pack] for pack in futures])

    def checked(self, packs, encoded):
        for pack, examples in zip(packs, encoded, strict=True):
            for i, example in zip(pack, examples, strict=True):
                if example.bad:
                    record, _ = self.record(i)
                    self.drop(record, example.bad)
                    self.bad.append({"id": record["id"], "where": record["where"], "draw": i, "reason": example.bad})
        return encoded


def _start_worker(mixture, tokenizer, config):
    global _loader
    torch.set_num_threads(1)
    _loader = Loader(mixture.sources, [1.0] * len(mixture.sources), tokenizer, config)
    _loader.mixture = mixture


def _encode_in_worker(i):
    return _loader.encode(i)


# ---------------------------------------------------------------------------------------------------------------
# model and optimizer


def pick_device(config):
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise UserError(f"--device {name}: this machine or this torch has none")
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if name == "cuda" else "float32"
    return torch.device(name), getattr(torch, dtype)


def open_model(args, config, device):
    if args.init:
        try:
            model = models.load(args.init)
        except (OSError, ValueError) as e:
            raise UserError(f"--init {args.init}: {e}") from None
        if model.config != config.model:
            raise UserError(f"--init {args.init}: its shape is not that of --preset {config.preset}")
    else:
        model = models.Molmo2(config.model).init_weights()
    model.residual_dropout, model.response_dropout = config.residual_dropout, config.response_dropout
    model.embedding.requires_grad_(not config.freeze_embedding)
    for part, parameters in model.groups().items():
        if part not in config.train:
            for p in parameters:
                p.requires_grad_(False)
    return model.to(device).train()


def learning_rate(step, base, warmup, total, final=0.1):
    """Linear from 0 over `warmup` steps, then a cosine that reaches final * base at `total`; the first update is step 1."""
    if step < warmup:
        return base * step / warmup
    if step >= total:
        return base * final
    return base * (final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2)


def schedule(config, part, step):
    """The part's rate; a run shorter than a few warm-ups warms up over a tenth of itself."""
    warmup = min(getattr(config.warmup, part), config.steps // 10)
    return learning_rate(step, getattr(config.lr, part), warmup, config.steps, config.final_lr)


# ---------------------------------------------------------------------------------------------------------------
# the loop


def train(args, config, out, device, dtype, sources, rates, tokenizer):
    """-> model, last loss, lines of the log."""
    torch.manual_seed(config.seed)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    loader = Loader(sources, rates, tokenizer, config)
    model = open_model(args, config, device)
    groups = {part: [p for p in ps if p.requires_grad] for part, ps in model.groups().items() if part in config.train}
    optimizer = torch.optim.AdamW([{"params": ps, "name": part} for part, ps in groups.items()], lr=0.0, betas=config.betas,
                                  eps=config.adam_eps, weight_decay=0.0, fused=device.type != "mps")
    head = {"config": dataclasses.asdict(config), "commit": commit(), "device": str(device), "dtype": str(dtype).split(".")[-1],
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "params": {part: sum(p.numel() for p in ps) for part, ps in model.groups().items()}}
    (out / "config.json").write_text(json.dumps(head, indent=1))
    log = open(out / "log.jsonl", "w", buffering=1)
    log.write(json.dumps(head) + "\n")
    lines = []

    bar = tqdm(islice(loader, config.steps), total=config.steps, unit="step", desc=f"stage {config.stage}", mininterval=1)
    started = time.time()
    for step, packs in enumerate(bar, 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(config, group["name"], step)
        examples = [e for pack in packs for e in pack]
        weight = float(sum(e.weights.sum(dtype="float64") for e in examples))
        total = 0.0
        for start in range(0, config.batch, config.micro_batch):
            rows = packs[start : start + config.micro_batch]
            batch = packing.build(rows, config.data.max_tokens, config.data.vision, config.crop_bucket).to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                nll, lse = model(batch)
            loss = (batch.weights * (nll + config.z_loss * lse**2)).sum() / max(weight, 1e-8)
            loss.backward()
            total += float((batch.weights * nll.detach()).sum()) / max(weight, 1e-8)
        norms = {part: float(torch.nn.utils.clip_grad_norm_(ps, config.clip)) for part, ps in groups.items()}
        norm = math.hypot(*norms.values())
        if not math.isfinite(total) or not math.isfinite(norm):
            raise RunError(f"step {step}: loss {total}, gradient norm {norm}; records: {', '.join(e.id for e in examples[:20])}")
        optimizer.step()
        optimizer.zero_grad()

        tokens = sum(len(e.tokens) for e in examples)
        crops = sum(0 if e.images is None else len(e.images) for e in examples)
        line = {"step": step, "loss": total, "weight": weight, "tokens": tokens,
                "loss_tokens": sum(int((e.weights > 0).sum()) for e in examples),
                "lr": {g["name"]: g["lr"] for g in optimizer.param_groups}, "grad_norm": norm, "grad_norms": norms,
                "fill_tokens": tokens / (config.batch * config.data.max_tokens), "fill_crops": crops / (config.batch * config.pack_crops),
                "examples": len(examples), "branches": sum(max(int(e.branch.max(initial=0)), 1) for e in examples),
                "branches_dropped": sum(e.dropped for e in examples), "dropped": dict(loader.dropped),
                "ids": hashlib.sha256("\n".join(e.id for e in examples).encode()).hexdigest()[:16], "seconds": time.time() - started}
        started = time.time()
        log.write(json.dumps(line) + "\n")
        lines.append(line)
        if loader.bad:
            with open(out / "skips.jsonl", "a") as skips:
                skips.writelines(json.dumps({"step": step, **bad}) + "\n" for bad in loader.bad)
            loader.bad.clear()
        bar.set_postfix(loss=f"{total:.3f}", fill=f"{line['fill_tokens']:.0%}", refresh=False)
    log.close()
    return model, lines


def commit():
    """The commit of the code that runs, with + if files differ from it; 'unknown' outside a checkout."""
    here = Path(__file__).parent

    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---------------------------------------------------------------------------------------------------------------
# what is left behind


def finish(args, config, out, model, lines, tokenizer):
    """Weights, curve, evaluation, samples -> the metrics."""
    from tools import evaluate, view  # here, because nobody has to open tools/ to understand the loop

    model.eval()
    models.save(model, out / "model")
    tokenizer.save(out / "model")
    state = {f.name: getattr(config.data, f.name) for f in dataclasses.fields(config.data) if f.name != "vision"}
    (out / "model" / "data.json").write_text(json.dumps(state))
    view.curve([line["loss"] for line in lines], out / "loss.png")
    if args.data and not args.eval:
        return {}
    if args.data:
        source = data.Records(args.eval, args.media)
        metrics, predictions = evaluate.evaluate(model, tokenizer, config.data, list(source))
        evaluate.draw(predictions, list(source), out / "samples")
        return metrics

    def held_out(split):
        world = tiny.World(split, config.seed)
        records = [world[i] for i in range(config.eval_images)]
        masks_of = lambda record, k: world.masks(record, record["annotations"][k])       # noqa: E731
        metrics, predictions = evaluate.evaluate(model, tokenizer, config.data, records, masks_of, max_new=128)
        evaluate.draw(predictions, records, out / "samples" / split)
        return metrics

    return {**held_out("test"), "unseen": held_out("unseen")}


def main(argv=None):
    begun = time.time()
    try:
        args, config = parse(argv)
        device, dtype = pick_device(config)
        sources, rates, tokenizer = open_sources(args, config)
        out = run_directory(args, config)
        model, lines = train(args, config, out, device, dtype, sources, rates, tokenizer)
        metrics = finish(args, config, out, model, lines, tokenizer)
    except (UserError, data.DataError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunError as e:
        print(f"train.py: {e}", file=sys.stderr)
        raise SystemExit(1) from None
    seconds = time.time() - begun
    with open(out / "log.jsonl", "a") as log:
        log.write(json.dumps({"step": config.steps, "eval": metrics, "seconds": seconds}) + "\n")
    print(json.dumps({"out": str(out), "steps": config.steps, "loss": lines[-1]["loss"], "seconds": round(seconds, 1), "eval": metrics}))


if __name__ == "__main__":
    main()
