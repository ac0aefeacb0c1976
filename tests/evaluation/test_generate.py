"""Decoding with a cache, and the two commands that ask a model."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import model
import packing
from evaluation import evaluate, generate, pictures
from records import media
from toy import world as tiny
from training import weights

CONFIG = dataclasses.replace(model.PRESETS["toy"], n_layer=2, vision=dataclasses.replace(model.TOY_VISION, n_layer=2, feature_layers=(1, 0)))
DATA = data.DataConfig(max_tokens=512, max_crops=1, length_hint=0, vision=CONFIG.vision)
TOKENIZER = data.ByteTokenizer(tiny.WORDS)


@pytest.fixture(scope="module")
def grown():
    torch.manual_seed(0)
    return model.Molmo2(CONFIG).init_weights().double().eval()


def prompts():
    world = tiny.World("test")
    asked = ["long_caption:", "pointing: red circle", "a much longer question about what there is to see?", "count: any shape"]
    return [data.encode_prompt([world.image(world[i])] if i != 2 else [], [(question, None)], TOKENIZER, DATA) for i, question in enumerate(asked)]


@pytest.mark.parametrize("family", ["qwen", "olmo"])
def test_the_cache_gives_what_a_full_forward_gives_for_prompts_of_different_lengths(grown, family):
    """... with images and without, one row shorter than the next; 24 tokens, compared by logits at every step."""
    if family == "olmo":
        yarn = model.YarnConfig(layers=(1,), original_max=64)
        grown = model.Molmo2(dataclasses.replace(CONFIG, family="olmo", n_kv_head=4, yarn=yarn)).init_weights().double().eval()
    seen = []
    grown.lm_head, project = lambda x: seen.append(project(x)) or seen[-1], grown.lm_head
    try:
        out = generate.generate(grown, prompts(), stops=-1, max_new=24)
    finally:
        del grown.lm_head
    for row, prompt in enumerate(prompts()):
        ids = [*prompt.tokens.tolist(), *out[row][:-1]]
        bidir = np.pad(prompt.bidir, (0, len(ids) - len(prompt.tokens)))
        whole = dataclasses.replace(prompt, tokens=np.array(ids), targets=np.array(ids), weights=np.zeros(len(ids), np.float32),
                                    pos=np.arange(len(ids)), branch=np.zeros(len(ids), np.int32), bidir=bidir)
        full = grown.logits(packing.collate([[whole]], len(ids), CONFIG.vision))[0]
        for step, logits in enumerate(seen):
            expected = full[len(prompt.tokens) - 1 + step]
            assert (logits[row] - expected).abs().max() < 1e-10
            assert out[row][step] == int(expected.argmax())


def test_generation_stops_at_eos_and_sampling_follows_its_seed(grown):
    out = generate.generate(grown, prompts(), TOKENIZER.eos, max_new=40, temperature=1.5, seed=3)
    assert all(TOKENIZER.eos not in ids for ids in out)
    assert out == generate.generate(grown, prompts(), TOKENIZER.eos, max_new=40, temperature=1.5, seed=3)
    assert out != generate.generate(grown, prompts(), TOKENIZER.eos, max_new=40, temperature=1.5, seed=4)
    first = generate.generate(grown, prompts()[:1], -1, max_new=5)[0]
    assert generate.generate(grown, prompts()[:1], first[3], max_new=5)[0] == first[: first.index(first[3])]


def test_sampling_gets_greedy_as_it_cools_and_nothing_is_told_after_the_end(grown):
    greedy = generate.generate(grown, prompts(), -1, max_new=12)
    assert generate.generate(grown, prompts(), -1, max_new=12, temperature=1e-4, seed=5) == greedy
    told = []
    generate.generate(grown, prompts()[:1], greedy[0][5], max_new=12, told=lambda ids: told.append(list(ids)))
    end = greedy[0].index(greedy[0][5])
    assert told == [greedy[0][:n] for n in range(1, end + 1)]


def test_a_prompt_without_images_wakes_no_vit(grown, monkeypatch):
    monkeypatch.setattr(grown.vision, "forward", lambda *args: 1 / 0)
    generate.generate(grown, prompts()[2:3], -1, max_new=3)
    with pytest.raises(ZeroDivisionError):
        generate.generate(grown, prompts()[1:3], -1, max_new=3)


def test_weights_come_back_bit_for_bit(grown, tmp_path):
    weights.save(grown, tmp_path)
    again = weights.load(tmp_path, dtype=torch.float64)
    assert again.config == grown.config and not again.training
    for (name, a), (other, b) in zip(grown.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    (tmp_path / "config.json").write_text(json.dumps({**dataclasses.asdict(CONFIG), "n_embd": 64}))
    with pytest.raises(ValueError, match=r"config.json asks for|do not fit"):
        weights.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model here; released ones come by hf download"):
        weights.load(tmp_path / "none")


def test_a_tied_head_is_saved_once_and_stays_tied(tmp_path):
    tied = model.Molmo2(dataclasses.replace(CONFIG, tied=True)).init_weights()
    weights.save(tied, tmp_path)
    again = weights.load(tmp_path)
    assert again.head is None and torch.equal(again.lm_head(torch.eye(CONFIG.n_embd)), tied.embedding.weight.T)


@pytest.mark.parametrize(("name", "total"), [("4b", 4_461_913_040), ("8b", 8_661_703_120), ("o7b", 7_760_786_896)])
def test_presets_have_the_published_number_of_parameters(name, total):
    with torch.device("meta"):
        m = model.Molmo2(model.PRESETS[name])
    assert sum(p.numel() for p in m.parameters()) == total


@pytest.mark.parametrize(("residual", "response"), [(0.0, 0.25), (0.25, 0.0)])
def test_dropout_touches_the_positions_of_its_stage(residual, response):
    """Stage 1: only positions whose target has loss; stages 2 and 3: all. The mean is kept."""
    torch.manual_seed(0)
    has_loss = torch.arange(64) % 2 == 0
    x = model.dropout(residual, response, has_loss[None])(torch.ones(1, 64, 4096))[0]
    assert torch.equal(x[~has_loss] == 1, torch.full((32, 4096), residual == 0))
    assert abs(float((x[has_loss] == 0).float().mean()) - 0.25) < 0.01 and abs(float(x.mean()) - 1) < 0.01
    assert float(x.max()) == pytest.approx(1 / 0.75)


def test_evaluation_has_no_dropout(grown):
    grown.residual_dropout = 0.5
    batch = packing.collate([[p] for p in prompts()[:1]], 256, CONFIG.vision)
    assert torch.equal(grown.hidden(batch), grown.hidden(batch))
    grown.residual_dropout = 0.0


# ---------------------------------------------------------------------------------------------------------------
# the commands


def saved_run(folder):
    torch.manual_seed(0)
    weights.save(model.Molmo2(CONFIG).init_weights(), folder)
    TOKENIZER.save(folder)
    (folder / "data.json").write_text(json.dumps({"max_tokens": 512, "max_crops": 1, "length_hint": 0}))
    return folder


FILM = str(Path(__file__).parents[1] / "media" / "bigbuckbunny.mp4")
PHOTOS = [str(Path(__file__).parents[1] / "media" / name) for name in ("coins.png", "chelsea.png", "rocket.jpg")]


@pytest.fixture
def asked(monkeypatch):
    """What generate.main hands to the decoder, and what the decoder answers: [prompts], {"answer": text}."""
    prompts, says = [], {"answer": "fine"}

    def answer(model, given, stops, max_new, temperature, seed, told=None, cache=None):
        prompts.extend(given)
        says["asked of"] = (model.norm.weight.dtype, temperature, seed, cache)
        ids = TOKENIZER.encode(says["answer"])
        for n in range(1, len(ids) + 1):
            if told:
                told(ids[:n])
        return [ids]

    monkeypatch.setattr(generate, "generate", answer)
    return prompts, says


def text_of(prompt):
    names = {i: "" if name == "im_patch" else f"<{name}>" for name, i in TOKENIZER.special.items()}
    marks = {TOKENIZER.chat_start: "[", TOKENIZER.chat_end: "]"}
    parts = [names.get(i) if i in names else marks.get(i) or TOKENIZER.decode([i]) for i in prompt.tokens.tolist()]
    return "".join(parts)


def test_a_video_with_subtitles_is_asked_about_at_its_times(tmp_path, asked, capsys):
    subtitles = "1\n00:00:00,000 --> 00:00:01,200\nTwo <i>lines</i>\nof it\n\n2\n00:00:04,500 --> 00:00:05,000\nlate\n"
    (tmp_path / "film.srt").write_text(subtitles)
    run, (prompts, says) = saved_run(tmp_path / "run"), asked
    says["answer"] = '<points coords="0.0 1 500 500;1.0 2 250 750">rabbit</points>'
    generate.main(["--model", str(run), "--video", FILM, "--frames", "5", "--end", "2", "--subtitles", str(tmp_path / "film.srt"),
                   "--prompt", "Where?", "--draw", str(tmp_path / "strip.png"), "--json"])
    said = json.loads(capsys.readouterr().out)
    frame = "<frame_start><frame_end>"
    assert text_of(prompts[0]) == (f"]0.0 {frame} 0.5 {frame} 1.0 {frame} 1.5 {frame} 2.0 {frame}subtitle\n0.0 - 1.2 Two lines of it\n"
                                   "[user\nWhere?]\n[assistant\n")
    video = media.probe(FILM)
    shown = list(media.frames(video, [0, 0.5, 1, 1.5, 2]))
    assert np.array_equal(prompts[0].images[2], data.vision.frame(shown[2], CONFIG.vision)[0][0]) and prompts[0].pool_src.shape[1] == 9
    assert said["points"] == [[0.0, "1", 0.5 * video.width, 0.5 * video.height], [1.0, "2", 0.25 * video.width, 0.75 * video.height]]
    strip = Image.open(tmp_path / "strip.png")
    points = [(0.5 * video.width, 0.5 * video.height)]
    w = round(video.width * 360 / video.height)
    cell = pictures.draw_points(shown[0], points, numbers=["1"]).resize((w, 360), Image.LANCZOS)
    assert np.array_equal(np.array(strip)[:360, :w], np.array(cell))
    assert strip.size == (2 * w + 4, 396)                                                                # the times are written below


def test_a_clip_of_a_video_has_a_time_of_its_own(tmp_path, asked, capsys):
    run, (prompts, _) = saved_run(tmp_path / "run"), asked
    generate.main(["--model", str(run), "--video", FILM, "--start", "2", "--end", "3.2", "--prompt", "What?"])
    assert [t for t in text_of(prompts[0]).split() if t.replace(".", "").isdigit()] == ["0.5", "1.0", "1.2"]
    late = list(media.frames(media.probe(FILM), [2, 2.5, 3, 3.2]))
    assert np.array_equal(prompts[0].images, np.concatenate([data.vision.frame(frame, CONFIG.vision)[0] for frame in late]))
    assert capsys.readouterr().out == "fine\n"
    late = data.open_clip(FILM, dataclasses.replace(DATA, fps=1.0), [(2.0, 2.5, "first"), (3.9, 4.0, "second")], start=2, end=4)[0]
    assert late.times == [0.0, 1.0, 2.0] and late.subtitles == [(0.0, 0.5, "first"), (pytest.approx(1.9), 2.0, "second")]
    assert data.open_clip(FILM, DATA, start=4)[0].times[-1] == pytest.approx(media.probe(FILM).duration - 4)


def test_what_is_drawn_on_a_clip_is_what_was_shown_then():
    video, points = media.probe(FILM), [(0.5, "1", 100, 100), (0.5, "2", 300, 200), (1.0, "2", 320, 200)]
    strip = generate.draw_answer(points, [], video, start=2.0)
    frames = list(media.frames(video, [2.5, 3.0]))
    cells = [pictures.draw_points(frames[0], [(100, 100), (300, 200)], numbers=["1", "2"]),
             pictures.draw_points(frames[1], [(320, 200)], numbers=["2"])]
    w = strip.width // 2 - 2
    for k, cell in enumerate(cells):
        assert np.array_equal(np.array(strip)[:360, k * (w + 4) :][:, :w], np.array(cell.resize((w, 360), Image.LANCZOS)))
    assert pictures.COLOURS[1] in {tuple(p) for p in np.array(cells[1]).reshape(-1, 3).tolist()}          # a track keeps its colour
    many = [(k / 10, "1", 5, 5) for k in range(30)]
    assert generate.draw_answer(many, [], video, 0.0).height == 6 * 396                                  # 24 frames, four in a row


def test_a_film_of_a_single_picture_can_be_asked_about(tmp_path, monkeypatch):
    """... also where its only frame lasts no time, as some files leave it open."""
    Image.fromarray(np.full((40, 60, 3), 7, np.uint8)).save(tmp_path / "one.gif")
    video = media.probe(tmp_path / "one.gif")
    for duration, times in ((video.duration, [0.0, video.duration]), (0.0, [0.0])):
        monkeypatch.setattr(media, "probe", lambda path, d=duration: dataclasses.replace(video, duration=d))
        clip, _ = data.open_clip(tmp_path / "one.gif", DATA)
        frames = list(clip.frames)
        assert clip.times == times and len(frames) == len(times)
        assert all(f.shape == (40, 60, 3) and abs(int(f.mean()) - 7) < 2 for f in frames)


def test_several_images_are_numbered_and_each_has_its_own_points(tmp_path, asked, capsys):
    run, (prompts, says) = saved_run(tmp_path / "run"), asked
    says["answer"] = '<points coords="1 1 500 500;3 2 1000 000;4 3 100 100">x</points>'
    generate.main(["--model", str(run), "--images", *PHOTOS, "--prompt", "pointing: x", "--json", "--draw", str(tmp_path / "a.png")])
    assert [f"Image {k}<low_res_im_start>" in text_of(prompts[0]) for k in (1, 2, 3, 4)] == [True, True, True, False]
    sizes = [Image.open(p).size for p in PHOTOS]
    points = json.loads(capsys.readouterr().out)["points"]               # of a fourth image there is none
    assert points == [[1.0, "1", sizes[0][0] / 2, sizes[0][1] / 2], [3.0, "2", sizes[2][0], 0.0]]
    drawn, photo = np.array(Image.open(tmp_path / "a.png")), Image.open(PHOTOS[1]).convert("RGB")
    width = (drawn.shape[1] - 8) // 3 + 4
    clean = np.array(photo.resize((round(photo.width * 360 / photo.height), 360), Image.LANCZOS))
    assert drawn.shape[0] == 396 and np.array_equal(drawn[:360, width : width + clean.shape[1]], clean)          # no point is on the second


def test_an_answer_is_told_as_it_grows_and_never_half_a_character(tmp_path, asked, capsys):
    run, (_, says) = saved_run(tmp_path / "run"), asked
    said = []
    says["answer"] = "zwölf Äpfel 🍎 im Korb"
    teller = generate.Teller(TOKENIZER)
    ids = TOKENIZER.encode(says["answer"])
    for n in range(1, len(ids) + 1):
        teller(ids[:n])
        said.append(capsys.readouterr().out)
    assert "".join(said) == says["answer"] and "\ufffd" not in "".join(said) and len([s for s in said if s]) == len(says["answer"])
    generate.main(["--model", str(run), "--prompt", "What?"])
    assert capsys.readouterr().out == says["answer"] + "\n"


def test_a_conversation_goes_on_from_what_the_cache_holds(grown):
    """Three turns through one cache give what each whole conversation gives from nothing, and only new tokens are computed."""
    world, turns, cache, computed = tiny.World("test"), [], generate.Cache(grown, 1, 0), []
    grown.transformer, trunk = lambda x, *rest: computed.append(x.shape[1]) or trunk(x, *rest), grown.transformer
    try:
        for question in ("pointing: red circle", "And why?", "count: any shape"):
            prompt = data.encode_prompt([world.image(world[0])], [*turns, (question, None)], TOKENIZER, DATA)
            computed.clear()
            (answer,) = generate.generate(grown, [prompt], TOKENIZER.stops, 12, cache=cache)
            first = computed[0]
            assert answer == generate.generate(grown, [prompt], TOKENIZER.stops, 12)[0]
            assert first == len(prompt.tokens) if not turns else first < 60 < len(prompt.tokens)
            turns.append((question, TOKENIZER.decode(answer)))
    finally:
        del grown.transformer


def test_a_cache_gives_nothing_of_what_has_changed(grown):
    """The same prompt again, one that goes on behind a cut answer, and one of the same words about another picture."""
    world, cache = tiny.World("test"), generate.Cache(grown, 1, 0)
    first, other = (data.encode_prompt([world.image(world[i])], [("long_caption:", None)], TOKENIZER, DATA) for i in (0, 1))
    assert first.tokens.tolist() == other.tokens.tolist() and not np.array_equal(first.images, other.images)
    (answer,) = generate.generate(grown, [first], -1, 7, cache=cache)
    longer = [*first.tokens.tolist(), *answer, 40, 41]
    grows = {"tokens": np.array(longer), "targets": np.array(longer), "weights": np.zeros(len(longer), np.float32),
             "pos": np.arange(len(longer)), "branch": np.zeros(len(longer), np.int32), "bidir": np.pad(first.bidir, (0, 9))}
    for prompt in (first, dataclasses.replace(first, **grows), other):
        assert generate.generate(grown, [prompt], -1, 7, cache=cache) == generate.generate(grown, [prompt], -1, 7)


def test_a_conversation_is_held_over_standard_input(tmp_path, asked, capsys, monkeypatch):
    run, (prompts, says) = saved_run(tmp_path / "run"), asked
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\n\nnever asked\n"))
    generate.main(["--model", str(run), "--image", PHOTOS[0], "--chat", "--temperature", "0.5", "--seed", "4", "--dtype", "bfloat16"])
    assert says["asked of"][:3] == (torch.bfloat16, 0.5, 4) and isinstance(says["asked of"][3], generate.Cache)
    assert capsys.readouterr().out == "fine\nfine\n" and len(prompts) == 2
    assert text_of(prompts[1]).endswith("[user\nOne?]\n[assistant\nfine]]\n[user\nTwo?]\n[assistant\n")
    assert np.array_equal(prompts[0].images, prompts[1].images)


def test_subtitles_are_read_from_three_kinds_of_files(tmp_path):
    expected = [(1.5, 3.25, "a b"), (3600.0, 3601.0, "c")]
    lines = ["1", "00:00:01,500 --> 00:00:03,250", "a", "b", "", "2", "01:00:00,000 --> 01:00:01,000", "c", ""]
    (tmp_path / "a.srt").write_text("\r\n".join(lines))
    lines = ["WEBVTT", "", "00:01.500 --> 00:03.250 align:start", "<v Ann>a b", "", "NOTE x", "", "01:00:00.000 --> 01:00:01.000", "c"]
    (tmp_path / "a.vtt").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text(json.dumps([{"start": 1.5, "end": 3.25, "text": "a b"}, {"start": 3600, "end": 3601, "text": "c"}]))
    for kind in ("srt", "vtt", "json"):
        assert generate.read_subtitles(tmp_path / f"a.{kind}") == expected
    (tmp_path / "b.srt").write_text("nothing")
    with pytest.raises(ValueError, match="no subtitle in it"):
        generate.read_subtitles(tmp_path / "b.srt")


def test_a_released_model_is_asked_at_the_released_settings():
    trained = data.DataConfig(**generate.RELEASED)
    asked = generate.asking(trained)
    assert (trained.max_crops, asked.max_crops, asked.max_images, asked.max_frames) == (8, 24, 20, 384)
    assert generate.asking(DATA).max_crops == 1 and generate.asking(trained, 12, 64).max_frames == 64


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_pt(run):
    """The run as it is where safetensors is not installed."""
    torch.save(model.Molmo2(CONFIG).state_dict(), run / "model.pt")
    (run / "model.safetensors").unlink(missing_ok=True)


def without_last(toy):
    """Masks that lack those of the last pointing annotation."""
    masks = dict(np.load(toy / "masks.npz"))
    masks.popitem()
    np.savez(toy / "masks.npz", **masks)


MISTAKES = {
    "cut safetensors": ("generate", lambda run, toy: cut(run / "model.safetensors"), [], "model.safetensors"),
    "cut pt": ("generate", lambda run, toy: as_pt(run) or cut(run / "model.pt"), [], "model.pt"),
    "no weights": ("generate", lambda run, toy: as_pt(run) or (run / "model.pt").unlink(), [], "without weights"),
    "another tokenizer": ("generate", lambda run, toy: (run / "tokenizer.json").write_text('{"version": "1.0", "model": {}}'), [],
                          "tokenizer"),
    "no tokens": ("generate", None, ["--max-new", "0"], "--max-new"),
    "no such folder": ("generate", None, ["--image", "toy/0.png", "--draw", "gone/a.png"], "--draw gone/a.png"),
    "no such image": ("generate", None, ["--image", "gone.png"], "S20 there is no file gone.png"),
    "a cut mask file": ("evaluate", lambda run, toy: cut(toy / "masks.npz"), ["--masks", "toy/masks.npz"], "--masks toy/masks.npz"),
    "a mask that lacks": ("evaluate", lambda run, toy: without_last(toy), ["--masks", "toy/masks.npz"], "needs an array"),
    "frames of nothing": ("generate", None, ["--frames", "5"], "--frames needs --video"),
    "no video": ("generate", None, ["--video", "toy/records.jsonl"], "S23 toy/records.jsonl"),
    "an empty clip": ("generate", None, ["--video", FILM, "--start", "9"], "there is nothing"),
    "no subtitles": ("generate", None, ["--video", FILM, "--subtitles", "toy/records.jsonl"], "no subtitle in it"),
    "too many pictures": ("generate", None, ["--images", *["toy/x.png"] * 21], "20 at most"),
    "too many frames": ("generate", None, ["--video", FILM, "--frames", "3000"], "--frames must be from 1 to 2048"),
    "no temperature": ("generate", None, ["--temperature", "nan"], "--temperature must be"),
    "hardly a temperature": ("generate", None, ["--temperature", "1e-45"], "below 0.001 it is greedy"),
    "a huge seed": ("generate", None, ["--seed", str(2**70)], "--seed must be"),
    "an endless answer": ("generate", None, ["--max-new", "10000000000000"], "--max-new must be"),
    "no such device": ("generate", None, ["--device", "meta"], "--device meta"),
    "an end of nothing": ("generate", None, ["--end", "3"], "--end needs --video"),
    "words that are none": ("generate", None, ["--prompt", "a\udcff"], "--prompt: not UTF-8"),
    "subtitles in another code": ("generate", lambda run, toy: (toy / "a.srt").write_bytes(b"\xe4"),
                                  ["--video", FILM, "--subtitles", "toy/a.srt"], "toy/a.srt: not UTF-8 at byte 0"),
    "no scores": ("evaluate", None, ["--max-new", "0"], "--max-new"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_users_mistake_costs_one_sentence(tmp_path, monkeypatch, capsys, name):
    tool, damage, flags, words = MISTAKES[name]
    run, toy = tmp_path / "run", tmp_path / "toy"
    torch.manual_seed(0)
    weights.save(model.Molmo2(CONFIG).init_weights(), run)
    if not (run / "model.safetensors").exists() and "safetensors" in name:
        pytest.skip("safetensors is not installed")
    TOKENIZER.save(run)
    (run / "data.json").write_text(json.dumps({"max_tokens": 512, "max_crops": 1}))
    tiny.export(toy, tiny.World("test"), 2)
    if damage:
        damage(run, toy)
    monkeypatch.chdir(tmp_path)
    own = ["--prompt", "count: any shape"] * ("--prompt" not in flags) if tool == "generate" else ["--data", "toy/records.jsonl"]
    monkeypatch.setattr("sys.argv", [tool, "--model", "run", *own, *flags])
    with pytest.raises(SystemExit) as end:
        {"generate": generate, "evaluate": evaluate}[tool].main()
    out = capsys.readouterr()
    assert end.value.code == 2 and not out.out and words in out.err and len(out.err.strip().splitlines()) == 1
