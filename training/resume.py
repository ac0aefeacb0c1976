"""Where a run writes, and the checkpoint that it continues from."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import model as models
import parallel
from records.errors import DataError, warn
from training import checkpoint
from training.config import Config, UserError, field_values
from training.log import read_skips
from weights import files

# fields that may change on resume: they affect layout and speed, not results
LAYOUT_FIELDS = {
    "device", "cp", "shard", "micro_batch", "workers", "activation_checkpointing",
    "uncheckpointed_blocks", "compile", "crop_bucket", "dry_run", "save_every", "keep",
    "eval_images", "max_skip", "on_nonfinite", "preset", "model"}


@dataclass(frozen=True)
class Checkpoint:
    """The step after which a run continues; step 0 without a folder: it begins."""
    folder: Path = None
    state: dict = field(default_factory=dict)

    @property
    def step(self):
        return self.state.get("step", 0)


def run_directory(args, config):
    return Path(args.out or f"runs/stage{config.stage}{'-tiny' if args.tiny else ''}")


def is_nonempty(path):
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def config_as_text(config):
    """{dotted field: value as text}, as a checkpoint keeps it."""
    return {name: json.dumps(value) for name, value in field_values(config).items()}


def find_checkpoint(args, config):
    """-> Checkpoint, and config with the model of its run; UserError if the recipe is another one,
    LoadError if there are checkpoints that cannot be read."""
    out = run_directory(args, config)
    if not args.resume:
        if args.out and is_nonempty(out):
            raise UserError(f"--out {out}: not empty; name another directory, or continue with the "
                            "run in it: --resume")
        return Checkpoint(), config
    steps = checkpoint.complete_steps(out)
    if not steps:
        if parallel.is_first_process():
            warn(f"train.py: no checkpoint in {out}: the run starts afresh")
        args.init = args.else_init
        return Checkpoint(), config
    folder = out / f"step-{steps[0]}"
    state = checkpoint.state_of(folder)
    if state.get("base"):
        args.init = args.else_init or state["base"]["path"]
    try:
        shape = files.config_from_dict(state["model"])
    except (AttributeError, KeyError, TypeError) as e:
        raise checkpoint.LoadError(folder, e) from None
    shape_is_asked_for = args.preset or config.model != models.PRESETS[config.preset]
    if config.model != shape and shape_is_asked_for:
        raise UserError(f"--resume: {folder} has another model than --preset and --model.* ask "
                        "for; leave them out")
    config = replace(config, model=shape, data=replace(config.data, vision=shape.vision))
    check_recipe(args, folder, state["config"], config_as_text(config))
    return Checkpoint(folder, state), config


def check_recipe(args, folder, theirs, ours):
    """UserError if the recipe has changed, but for fields that do not affect results. A field that
    is younger than the checkpoint had its default."""
    theirs = config_as_text(Config()) | theirs
    changed = [f"{key} was {theirs.get(key)} and is {ours.get(key)}"
               for key in sorted({*theirs, *ours})
               if key.split(".")[0] not in LAYOUT_FIELDS and theirs.get(key) != ours.get(key)]
    if changed and not args.resume_anyway:
        raise UserError(f"--resume: {folder} is of another recipe: {'; '.join(changed)}. "
                        "--resume-anyway continues all the same")


def find_base(args, config, resume_from):
    """Of a run with adapters, whose checkpoints hold only what learns -> the folder with all other
    weights, and the checksums of its files. UserError without one, or if it has changed."""
    if not config.lora.rank:
        return None
    if args.init is None:
        raise UserError("--lora: adapters are put on trained weights; name them with --init")
    try:
        checksums = files.fingerprint(args.init) if parallel.is_first_process() else None
    except (OSError, ValueError) as e:
        raise UserError(f"--init (or --else-init) {args.init}: {e}") from None
    base = {"path": str(Path(args.init).absolute()), "files": parallel.broadcast(checksums)}
    if (resume_from.state.get("base") or base)["files"] != base["files"]:
        raise UserError(f"--resume: {base['path']} has other weights than those that the adapters "
                        "were put on; --else-init DIR names a folder that has them")
    return base


def check_data(args, resume_from, fingerprint):
    """UserError if the run so far was with other data."""
    changed = [key for key in fingerprint if resume_from.state["data"].get(key) != fingerprint[key]]
    if changed and not args.resume_anyway:
        raise UserError(f"--resume: {resume_from.folder} is of other data ({', '.join(changed)} "
                        "changed). --resume-anyway continues all the same")


def restore_loader(loader, plans, resume_from):
    """The loader continues where the checkpoint says; what the run has masked is masked unseen."""
    try:
        if plans:
            plans.restore(resume_from.state["loader"]["plans"])
            loader.masked.counts.update(resume_from.state["loader"]["masked"])
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as e:
        raise checkpoint.LoadError(resume_from.folder, e) from None
    skips = read_skips(resume_from.folder.parent)
    loader.known_masked = {skip["index"]: skip["reason"] for skip in skips}


def make_run_directory(args, config, resume_from):
    """Makes the directory of a run that begins; the default one of an older run is renamed.

    UserError if what is there is no run directory, or if it cannot be made.
    """
    out = run_directory(args, config)
    try:
        if not resume_from.folder and is_nonempty(out):
            if not (out / "log.jsonl").is_file() and not (out / "model").is_dir():
                raise UserError(f"--out {out}: not a run directory (no log.jsonl, no model)")
            n = 1
            while (aside := out.with_name(f"{out.name}.old-{n}")).exists():
                n += 1
            whole = out.resolve()
            out.rename(aside)
            if args.init and Path(args.init).resolve().is_relative_to(whole):
                # the weights, which are not read yet, have moved with it
                args.init = str(aside / Path(args.init).resolve().relative_to(whole))
            warn(f"train.py: the run in {out} is now in {aside}")
        (out / "model").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: {e.strerror}") from None
    return out
