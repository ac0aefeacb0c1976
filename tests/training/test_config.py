"""Every config field is a flag, all flags follow one rule, and a mistake gives one sentence."""

import dataclasses
import json

import pytest

import model as models
from records.errors import UserError
from stages import tiny
from tests.training.runs import SMALL, run, sentence
from training.config import (
    FIELDS,
    STAGES,
    Config,
    GroupRates,
    check,
    describe_fields,
    field_values,
    override,
    parse,
    spell_flag,
)
from weights.files import config_from_dict

TINY = ["--stage=1", "--tiny"]


def config_of(*words):
    return parse([*TINY, *words])[1]


def test_stages_are_those_of_table_12_in_version_4_of_the_paper():
    one, two, three = (parse([f"--stage={stage}"])[1] for stage in "123")
    stages = (one, two, three)
    assert [(c.response_dropout, c.residual_dropout) for c in stages] == [
        (0.1, 0.0), (0.0, 0.1), (0.0, 0.1)]
    assert [(c.steps, c.batch, c.data.max_tokens, c.pack_crops) for c in stages] == [
        (32_000, 128, 2560, 16), (30_000, 128, 16_384, 128), (2_000, 128, 36_864, 384)]
    later = GroupRates(5e-6, 5e-6, 1e-5)
    # the table gives 2e-4 for the language model in stage 1 (docs/molmo2.md 16)
    assert [c.lr for c in stages] == [GroupRates(6e-6, 2e-4, 2e-5), later, later]
    later = GroupRates(200, 200, 200)
    assert [c.warmup for c in stages] == [GroupRates(2000, 200, 2000), later, later]
    assert [c.micro_batch for c in stages] == [4, 2, 1]
    for c in stages:
        assert c.freeze_embedding
        assert (c.pool_size, c.recompute, c.crop_bucket) == (48, 1, 2)
        assert (c.betas, c.adam_eps, c.clip, c.z_loss, c.final_lr) == (
            (0.9, 0.95), 1e-6, 1.0, 1e-4, 0.1)
        assert c.model == models.PRESETS["4b"]
    later = (True, True, 0.2, False, ";")
    data = [c.data for c in stages]
    assert [(d.sqrt_length, d.sqrt_branches, d.point_weight, d.prefix_all, d.separator)
            for d in data] == [(False, False, 1.0, True, "\t"), later, later]


def test_tiny_learns_faster_in_small_rows_from_stage_to_stage():
    """RESULTS.md was measured with these numbers."""
    stages = [parse([f"--stage={stage}", "--tiny"])[1] for stage in "123"]
    assert [(c.steps, c.batch, c.data.max_tokens, c.pack_crops) for c in stages] == [
        (2200, 3, 512, 16), (2800, 2, 1024, 32), (1200, 1, 2048, 64)]
    assert [c.lr for c in stages] == [
        GroupRates(5e-5, 4e-4, 2.2e-3), GroupRates(5e-5, 4e-4, 2e-3), GroupRates(5e-5, 2e-4, 5e-4)]
    assert [c.data.max_frames for c in stages[1:]] == [6, 18]
    for c in stages:
        assert (c.vit, c.train, c.eval_images) == ("toy", ("connector", "llm"), 100)
        assert (c.warmup, c.data.length_hint) == (GroupRates(60, 60, 60), 0)
        assert c.response_dropout == c.residual_dropout == 0


def test_tiny_changes_sizes_and_prompts_of_a_stage_and_not_what_it_is():
    tiny = parse(["--stage=2", "--tiny"])[1]
    data = tiny.data
    assert (data.sqrt_length, data.point_weight, data.prefix_all) == (True, 0.2, True)
    assert tiny.preset == "toy"
    assert tiny.model == models.PRESETS["toy"]
    assert not tiny.freeze_embedding
    assert parse(["--stage=2", "--tiny", "--preset=8b"])[1].model == models.PRESETS["8b"]


def test_a_flag_can_be_spelled_in_each_way_and_the_last_one_counts():
    for words in (["--data.max-tokens", "512"], ["--data.max_tokens=512"]):
        args, config = parse(["--stage=1", "--tiny", "--data", "a-b", "b=2-3", *words, "--data=c",
                              "--eval=d", "--skip_missing", "--eval_every=3", "--resume-anyway",
                              "--eval", "e"])
        assert config.data.max_tokens == 512
        assert (args.data, args.eval) == (["a-b", "b=2-3", "c"], ["d", "e"])  # lists are joined
        assert (args.skip_missing, args.eval_every, args.resume) == (True, 3, True)
    args, config = parse([*TINY, "--steps", "7", "--workers=2", "--steps", "8"])
    assert config.steps == 8
    assert args.fields == {"steps": 8, "workers": 2}
    assert config_of("--train", "vit,connector").train == ("vit", "connector")
    assert config_of("--lora", "4").train == ("connector", "llm")
    assert config_of("--lora", "4", "--train", "llm").train == ("llm",)
    assert config_of("--model.yarn.layers=1,2").model.yarn.layers == (1, 2)
    assert config_of("--data.separator", r"\t").data.separator == "\t"  # as a shell passes it
    assert config_of("--compile").compile
    assert (config_of().cp_heads, config_of("--cp-exchange", "gather").cp_heads) == (0, 1)
    assert not config_of("--freeze-embedding=0").freeze_embedding


def test_every_field_is_a_flag_of_its_type():
    other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v / 2 + 0.001,
             tuple: lambda v: v, str: lambda v: v}
    config = field_values(config_of())
    wanted = {name: other[type(value)](value) for name, value in config.items() if name not in (
        "stage", "preset", "batch", "lora.rank", "deterministic",
        "beta", "data.high_res_share")}
    texts = {name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
             for name, value in wanted.items()}
    found = field_values(config_of(*(f"--{name}={text}" for name, text in texts.items())))
    assert found == config | wanted | {"micro_batch": config["batch"]}  # at most one batch


def test_a_stage_of_ones_own_needs_settings_for_the_toy_and_has_the_records_of_stage_3(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STAGES, 4, STAGES[3])
    assert parse(["--stage=4"])[1].stage == 4
    with pytest.raises(UserError, match=r"stages/tiny\.py has no settings for stage 4"):
        config_of("--stage=4")
    monkeypatch.setitem(tiny.STAGES, 4, tiny.STAGES[3])
    found = []
    for stage in ("3", "4"):
        assert run(tmp_path / stage, *SMALL, f"--stage={stage}", "--data.max_tokens=2048",
                   "--batch=1", "--steps=1", "--save-every=0", "--json") == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert found[0] == found[1]


def test_deterministic_runs_have_no_dropout_and_a_micro_batch_is_at_most_a_batch():
    config = config_of("--deterministic", "--response_dropout=0.5", "--steps=3", "--batch=2")
    assert config.response_dropout == config.residual_dropout == 0
    assert config.micro_batch == 2


@pytest.mark.parametrize(("words", "recipe"), [
    ([], ["1"]), (["--tiny", "--preset", "8b", "--stage=3"], ["3", "--tiny", "--preset", "8b"])])
def test_help_lists_every_field_with_its_meaning_and_the_default_of_the_recipe(
        capsys, words, recipe):
    with pytest.raises(SystemExit) as end:
        parse([*words, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"one stage (the defaults below are for --stage {' '.join(recipe)}). " in text
    defaults = field_values(parse(["--stage", *recipe])[1])
    for name in FIELDS:
        default = text.split(f" --{spell_flag(name)} ")[-1].split("(default ")[1]
        assert default.startswith(f"{defaults[name]!r})"), name
    # no field has its own name in place of a meaning
    assert not [name for name, meaning in describe_fields(Config()).items()
                if name in FIELDS and name.endswith(meaning.split(": ")[-1])]
    assert "--clip X largest gradient norm; each parameter group is clipped by itself (" in text
    assert "--lr.llm X peak learning rates: the decoder (default" in text
    assert "--data FILE" in text


@dataclasses.dataclass
class Wrapped:
    # A heading is no help.
    rate: float = 0.5  # a share, at most
                       # 50 % of all
    name: str = "a # b"  # a text
    pair: tuple = (
        1, 2)  # two numbers


def test_help_does_not_depend_on_how_a_comment_or_a_field_is_broken_into_lines():
    assert describe_fields(Wrapped()) == {
        "rate": "a share, at most 50 %% of all", "name": "a text", "pair": "two numbers"}


def test_an_image_of_high_resolution_fits_a_pack():
    def high_res_crops(*words):
        return parse([*words, "--data=x.jsonl"])[1].data.high_res_crops

    assert high_res_crops("--stage=2") == 24
    assert high_res_crops("--stage=2", "--pack_crops=16") == 15    # plus the global view


def test_every_number_has_a_range():
    """-1 and NaN are outside every range."""
    args, config = parse(TINY)
    for name, value in FIELDS.items():
        for wrong in {int: (-1,), float: (-1.0, float("nan"))}.get(type(value), ()):
            with pytest.raises(UserError, match=f"--{spell_flag(name)} {wrong}: must be "):
                check(args, override(config, name, wrong))


def test_a_config_is_read_from_the_json_of_a_run():
    config = config_of("--lr.vit=1e-4", "--model.n_layer=2", "--train=llm")
    found = config_from_dict(json.loads(json.dumps(dataclasses.asdict(config))), Config())
    assert found == config


MISTAKES = [
    (["--stpes", "3"], "--stpes: no such flag or field; did you mean --steps?"),
    (["--lr", "1e-3"], "--lr: no such flag or field; each part has its own: --lr.llm, --lr.conn"),
    (["--learning-rate=1"], "--learning-rate: no such flag or field; each part has its own: --lr."),
    (["--tiny", "--data", "x", "--eval-every", "5"], "--eval-every needs --eval FILE"),
    (["--beta=0.1"], "--beta: no such flag or field; python -m examples.preferences trains on"),
    (["--compile=maybe"], "--compile: invalid true_or_false value: 'maybe'"),
    (["--activation-checkpointing=false"], "such flag or field; use --recompute 1 for true"),
    (["--uncheckpointed_blocks=13"], "such flag or field; --recompute 0.7 computes the"),
    (["--betas=0.9,1"], "--betas needs two numbers from 0 to below 1"),
    (["--train", "vision"], "--train: choose one or more of vit, connector, llm"),
    (["--lr.llm=nan"], "--lr.llm nan: must be from 0 to 1"),
    (["--lora", "2", "--lora.layers=k,x"], "in --lora.layers some of q, k, v"),
    (["--lora", "2", "--lora.layers="], "in --lora.layers some of q, k, v"),
    (["--lora", "2", "--train", "vit"], "--lora needs llm in --train"),
    (["--lora", "2", "--freeze_embedding=false"], "--lora does not train the embedding"),
    (["--data.separator=x"], "--data.separator: invalid choice: 'x'"),
    (["--resume", "--overwrite"], "--resume and --overwrite contradict each other"),
    (["--else-init", "x"], "--else-init needs --resume"),
    (["--eval_every=-1"], "--eval-every -1: must be at least 0"),
    (["--eval", "x"], "--eval and --skip-missing need --data"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(w) for w, _ in MISTAKES])
def test_a_mistake_is_one_sentence_that_says_where(tmp_path, capsys, words, message):
    assert run(tmp_path / "out", *TINY, *words) == 2
    sentence(capsys, message)
    assert not list(tmp_path.iterdir())
