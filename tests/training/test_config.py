"""One rule for all flags, every field has bounds, and a mistake costs one sentence."""

import dataclasses
import json
import math

import pytest

import model as models
from records.media import MAX_FRAMES
from tests.training.runs import run, sentence
from text.tokenizer import SPECIAL
from toy import world
from training.config import (
    Config,
    GroupRates,
    UserError,
    config_from_json,
    field_values,
    override,
    parse,
)
from training.limits import CHOICES, RANGES

TINY = ["--stage", "1", "--tiny"]


def config_of(*words):
    return parse([*TINY, *words])[1]


# --------------------------------------------------------------------------------------------------
# recipes


def test_stages_are_those_of_table_12():
    one, two, three = (parse(["--stage", stage])[1] for stage in "123")
    stages = (one, two, three)
    assert [(c.response_dropout, c.residual_dropout) for c in stages] == [
        (0.1, 0.0), (0.0, 0.1), (0.0, 0.1)]
    assert [(c.steps, c.batch, c.data.max_tokens, c.pack_crops) for c in stages] == [
        (31_000, 128, 2536, 16), (30_000, 128, 16_384, 128), (2_000, 128, 36_864, 384)]
    later = GroupRates(5e-6, 5e-6, 1e-5)
    assert [c.lr for c in stages] == [GroupRates(6e-6, 2e-4, 2e-5), later, later]
    later = GroupRates(200, 200, 200)
    assert [c.warmup for c in stages] == [GroupRates(2000, 200, 2000), later, later]
    assert [c.micro_batch for c in stages] == [4, 2, 1]
    for c in stages:
        assert c.freeze_embedding
        assert (c.betas, c.adam_eps, c.clip, c.z_loss, c.final_lr) == (
            (0.9, 0.95), 1e-6, 1.0, 1e-4, 0.1)
        assert c.model == models.PRESETS["4b"]
    later = (True, True, 0.2, False, ";")
    data = [c.data for c in stages]
    assert [(d.sqrt_length, d.sqrt_branches, d.point_weight, d.prefix_all, d.separator)
            for d in data] == [(False, False, 1.0, True, "\t"), later, later]


def test_tiny_changes_sizes_and_prompts_of_a_stage_and_not_what_it_is():
    tiny = parse(["--stage", "2", "--tiny"])[1]
    data = tiny.data
    assert (data.sqrt_length, data.point_weight, data.prefix_all) == (True, 0.2, True)
    assert tiny.preset == "toy"
    assert tiny.model == models.PRESETS["toy"]
    assert not tiny.freeze_embedding
    assert parse(["--stage", "2", "--tiny", "--preset", "8b"])[1].model == models.PRESETS["8b"]


# --------------------------------------------------------------------------------------------------
# flags


SPELLINGS = [["--data.max-tokens", "512"], ["--data.max_tokens", "512"], ["--data.max_tokens=512"]]


@pytest.mark.parametrize("words", SPELLINGS, ids=" ".join)
def test_a_flag_can_be_spelled_in_each_way(words):
    assert config_of(*words).data.max_tokens == 512
    assert config_of("--micro-batch", "1").micro_batch == config_of("--micro_batch=1").micro_batch
    args, _ = parse(["--stage=1", "--tiny", "--data", "a", "b=2", *words, "--skip_missing",
                     "--eval_every=3", "--resume-anyway"])
    assert args.data == ["a", "b=2"]
    assert args.skip_missing
    assert args.eval_every == 3
    assert args.resume


def test_every_field_is_a_flag_of_its_type():
    other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v / 2 + 0.001,
             tuple: lambda v: v, str: lambda v: v}
    config = config_of()
    for name, value in field_values(config).items():
        if name in ("stage", "preset", "vit_steps", "uncheckpointed_blocks", "batch", "lora.rank"):
            continue
        wanted = other[type(value)](value)
        text = ",".join(map(str, wanted)) if isinstance(wanted, tuple) else str(wanted)
        found = field_values(config_of(f"--{name}={text}"))
        if name == "micro_batch":
            wanted = config.batch                        # it is never larger
        assert found[name] == wanted
        assert {n for n in found if found[n] != field_values(config)[n]} <= {name}


def test_flags_are_taken_in_their_order_and_known_to_the_caller():
    args, config = parse([*TINY, "--steps", "7", "--workers=2", "--steps", "8"])
    assert config.steps == 8
    assert args.fields == {"steps": "8", "workers": "2"}
    assert "workers" not in parse(TINY)[0].fields
    json.dumps(vars(args))


def test_tuples_booleans_and_numbers_are_read():
    assert config_of("--train", "vit,connector").train == ("vit", "connector")
    assert config_of("--betas", "0.8,0.9").betas == (0.8, 0.9)
    assert config_of("--model.yarn.layers=1,2").model.yarn.layers == (1, 2)
    assert config_of("--model.vision.feature_layers", "1,0").model.vision.feature_layers == (1, 0)
    assert config_of("--compile", "True").compile
    assert not config_of("--freeze-embedding=0").freeze_embedding
    assert config_of("--lr.vit", "1e-5").lr == dataclasses.replace(config_of().lr, vit=1e-5)
    assert config_of("--data.separator", ";").data.separator == ";"


def test_deterministic_runs_have_no_dropout_and_a_short_run_a_short_stage_0():
    config = config_of("--deterministic", "--response_dropout=0.5", "--steps", "3", "--batch", "2")
    assert config.response_dropout == config.residual_dropout == 0
    assert config.vit_steps == 3
    assert config.micro_batch == 2


def test_crops_are_those_of_the_model():
    config = config_of("--model.vision.patch=12")
    assert config.data.vision == config.model.vision
    vision = dataclasses.replace(config.model.vision, grid=8)
    shape = dataclasses.replace(config.model, vision=vision)
    assert dataclasses.replace(config, model=shape).data.vision.grid == 8


def test_help_lists_every_flag_and_field_with_its_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in field_values(Config()):
        assert f"--{name} " in text
    for line in ("  --clip 1.0   ", "  --lr.connector 0.0002   ", "  --data.max_tokens 2536   "):
        assert line in text
    assert "largest gradient norm" in text
    assert "peak learning rates: the decoder" in text
    for flag in ("--resume", "--init DIR", "--data FILE", "--eval-every N"):
        assert flag in text


def test_a_config_is_read_from_the_json_of_a_run():
    config = config_of("--lr.vit=1e-4", "--model.n_layer=2", "--train", "llm")
    assert config_from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_override_replaces_one_field():
    assert override(Config(), "model.vision.grid", "9").model.vision.grid == 9
    assert override(Config(), "lr.vit", 1e-3).lr.vit == 1e-3
    with pytest.raises(UserError, match=r"did you mean --model\.vision\.grid"):
        override(Config(), "data.vision.grdi", 3)


# --------------------------------------------------------------------------------------------------
# mistakes


MISTAKES = [
    (["--stpes", "3"], "--stpes: no such flag or field - did you mean --steps?"),
    (["--lr.vot=1"], "did you mean --lr.vit?"),
    (["--resmue"], "did you mean --resume?"),
    (["--data.vision.grid=3"], "did you mean --model.vision.grid?"),
    (["--model=3"], "--model: no such flag or field"),
    (["--cache", "x"], "--cache: no such flag or field"),
    (["--"], "no such flag"),
    (["stray"], "stray"),
    (["-x"], "-x"),
    (["--steps"], "--steps: needs a value"),
    (["--steps", "--batch=2"], "--steps: needs a value"),
    (["--stage", "7"], "--stage"),
    (["--pool_size=many"], "--pool_size many: not an integer"),
    (["--pool_size=1.5"], "not an integer"),
    (["--pool_size=inf"], "not an integer"),
    (["--steps="], "not an integer"),
    (["--clip=x"], "--clip x: not a number"),
    (["--compile=maybe"], "--compile maybe: not true or false"),
    (["--betas=0.9,x"], "--betas 0.9,x: not a list"),
    (["--betas=0.9"], "--betas 0.9: must be two numbers"),
    (["--train", "vision"], "--train vision: choose from vit, connector, llm"),
    (["--train", ""], "choose from vit, connector, llm"),
    (["--dry_run=maybe"], "choose from auto, true, false"),
    (["--on-nonfinite", "ignore"], "choose from stop, skip"),
    (["--device", "tpu"], "choose from auto, cpu, cuda, mps"),
    (["--dtype", "float16"], "choose from auto, float32, bfloat16"),
    (["--model.family=gemma"], "choose from qwen, olmo, llama"),
    (["--preset", "70b"], "--preset"),
    (["--batch", "4", "--micro-batch", "3"], "--micro-batch 3: --batch 4 is not a multiple of it"),
    (["--uncheckpointed_blocks=1"], "only goes with --activation_checkpointing true"),
    (["--model.vision.overlap_margin=5"], "less than half of --model.vision.grid 10"),
    (["--resume", "--init", "x"], "leave one of them out"),
    (["--else-init", "x"], "--else-init only goes with --resume"),
    (["--eval-every", "-1"], "--eval-every -1: must be at least 0"),
    (["--eval", "x"], "--eval: only goes with --data"),
    (["--media", "x"], "--media: only goes with --data"),
    (["--skip-missing"], "--skip-missing: only goes with --data"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(w) for w, _ in MISTAKES])
def test_a_mistake_is_one_sentence_that_says_where(words, message):
    with pytest.raises(UserError) as mistake:
        parse([*TINY, *words])
    assert message in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_mistake_ends_the_command_with_status_2(tmp_path, capsys):
    assert run(tmp_path / "out", *TINY, "--clip=-1") == 2
    sentence(capsys, "--clip -1.0: must be between 1e-06 and 1000000000.0")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# bounds


def test_every_number_has_bounds_and_its_defaults_lie_within():
    values = field_values(Config())
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        is_number = name == "model.yarn.layers" or (
            isinstance(numbers[0], (int, float)) and not isinstance(numbers[0], bool))
        assert (name in RANGES) == is_number, name
    assert RANGES.keys() | CHOICES.keys() <= values.keys()
    assert RANGES["data.max_frames"][1] == MAX_FRAMES
    assert RANGES["model.n_vocab"][0] == 258 + len(world.WORDS)
    assert RANGES["model.n_extra"][0] == len(SPECIAL)


@pytest.mark.parametrize("name", RANGES)
def test_a_number_outside_its_bounds_is_refused(name):
    """... and so are NaN and infinity; what an integer cannot be is refused before."""
    least, greatest = RANGES[name]
    step = 1 if isinstance(least, int) and isinstance(greatest, int) else abs(greatest) / 1e9
    is_tuple = isinstance(field_values(Config())[name], tuple)
    for value in (least - step, greatest + step, math.nan, math.inf, -math.inf, -1, 1e308, 2**64):
        with pytest.raises(UserError, match=rf"--{name} .*must be between .* and "):
            override(Config(), name, (value,) * 2 if is_tuple else value)
    for value in (least, greatest):
        override(Config(), name, (value,) * 2 if is_tuple else value)


TURNED_AROUND = [
    "--clip=-1", "--clip=0", "--clip=nan", "--lr.llm=-1e-4", "--lr.vit=1e308", "--lr.vit=inf",
    "--data.point_weight=-1", "--data.video_caption_weight=nan", "--z_loss=-1", "--final_lr=-0.1",
    "--residual_dropout=1.5", "--response_dropout=-0.1", "--response_dropout=1", "--max_skip=nan",
    "--seed=18446744073709551616", "--model.n_vocab=100", "--model.n_layer=-1", "--model.n_extra=0",
    "--model.vision.grid=0", "--adam_eps=-1", "--data.max_tokens=1000000000",
    "--crop_bucket=1000000000", "--workers=-1", "--seed=-1", "--uncheckpointed_blocks=-1",
    "--data.max_crops=0", "--pool_size=0", "--data.fps=0", "--warmup.llm=-1", "--betas=0.9,1",
]


@pytest.mark.parametrize("flag", TURNED_AROUND)
def test_what_would_turn_training_around_is_refused(flag):
    name = flag.partition("=")[0]
    with pytest.raises(UserError, match=f"{name} .*must be between"):
        config_of(flag)
