"""tools.generate: the input of the model, the printed answer, the drawing, and one sentence for a
mistake."""

import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import vision
from evaluation import answer, pictures
from evaluation.generate import Sampling
from records import media
from records.errors import UserError
from records.visual import read_headers
from tests.evaluation.small_model import DATA, MEDIA, TOKENIZER, VISION, save_run
from tests.records.numbered import make_video
from tools import generate
from toy import world

VIDEO = str(MEDIA / "bigbuckbunny.mp4")
PHOTOS = [str(MEDIA / name) for name in ("coins.png", "chelsea.png", "rocket.jpg")]
FRAME = "<frame_start><frame_end>"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run")


class FakeModel:
    """Replaces the model: it returns a fixed answer, and stores its prompts."""

    def __init__(self):
        self.prompts = []
        self.answer = "fine"
        self.options = None

    def generate(self, model, prompts, stops, max_new, sampling, on_token):
        self.prompts += prompts
        self.options = model.norm.weight.dtype, sampling
        ids = TOKENIZER.encode(self.answer)[:max_new]
        for n in range(1, len(ids) + 1):
            if on_token:
                on_token(ids[:n])
        return [ids]


@pytest.fixture
def fake(monkeypatch):
    fake = FakeModel()
    monkeypatch.setattr(answer, "generate", fake.generate)
    return fake


@pytest.fixture
def call(saved_run, capsys):
    """call(*flags) -> stdout"""

    def run(*flags):
        run_model(saved_run, *flags)
        return capsys.readouterr().out

    return run


def run_model(model, *flags):
    generate.main(["--model", *map(str, [model, *flags])])


def text_of(prompt):
    """The tokens of a prompt as text. Special tokens become <name>. Patches are omitted, and the
    tokens of the chat format become [ and ]."""
    names = {i: f"<{name}>" for name, i in TOKENIZER.special.items()}
    names |= {TOKENIZER.special["im_patch"]: "", TOKENIZER.chat_start: "[", TOKENIZER.chat_end: "]"}
    ids = prompt.tokens.tolist()
    return "".join(names[i] if i in names else TOKENIZER.decode([i]) for i in ids)


def test_several_images_are_numbered_and_each_has_its_own_points(call, fake):
    fake.answer = '<points coords="1 1 500 500;3 2 1000 000;4 3 100 100">x</points>'
    words = [word for photo in PHOTOS for word in ("--image", photo)]  # the flag may be repeated
    call(*words, "--prompt", "pointing: x")
    out = call("--images", PHOTOS[0], "--images", *PHOTOS[1:], "--prompt", "pointing: x", "--json")
    assert text_of(fake.prompts[0]) == text_of(fake.prompts[1])
    text = text_of(fake.prompts[0])
    named = [f"Image {k}<low_res_im_start>" in text for k in (1, 2, 3, 4)]
    assert named == [True, True, True, False]
    sizes = [Image.open(path).size for path in PHOTOS]
    # there is no fourth image
    assert json.loads(out)["points"] == [
        [1.0, "1", sizes[0][0] / 2, sizes[0][1] / 2], [3.0, "2", sizes[2][0], 0.0]]


def test_a_clip_with_subtitles_is_shown_at_times_of_its_own(call, fake, tmp_path):
    (tmp_path / "video.srt").write_text(
        "1\n00:00:01,000 --> 00:00:02,200\nTwo <i>lines</i>\nof it\n\n"
        "2\n00:00:04,500 --> 00:00:05,000\nlate\n")
    fake.answer = '<points coords="0.0 1 500 500;1.0 2 250 750">rabbit</points>'
    out = call("--video", VIDEO, "--frames", 5, "--start", 1, "--end", 2.7, "--subtitles",
               tmp_path / "video.srt", "--prompt", "Where?", "--draw", tmp_path / "frames.png",
               "--json")
    (prompt,) = fake.prompts
    assert text_of(prompt) == (
        f"]0.0 {FRAME} 0.5 {FRAME} 1.0 {FRAME} 1.5 {FRAME} 1.7 {FRAME}"
        "subtitle\n0.0 - 1.2 Two lines of it\n[user\nWhere?]\n[assistant\n")
    video = media.probe(VIDEO)
    crops = [vision.frame(frame, VISION)
             for frame in media.frames(video, [1, 1.5, 2, 2.5, 2.7])]
    assert np.array_equal(prompt.images, np.concatenate(crops))
    assert prompt.pool_src.shape[1] == 9
    w, h = video.width, video.height
    assert json.loads(out)["points"] == [
        [0.0, "1", 0.5 * w, 0.5 * h], [1.0, "2", 0.25 * w, 0.75 * h]]
    assert Image.open(tmp_path / "frames.png").width > 100


def test_a_cut_answer_says_so_and_its_complete_points_are_read(call, fake, capsys):
    fake.answer = '<points coords="1 1 500 500 2 250 750">x</points>'
    flags = "--image", PHOTOS[0], "--prompt", "pointing: x"
    w, h = Image.open(PHOTOS[0]).size
    n = len(TOKENIZER.encode('<points coords="1 1 500 500 2 250'))
    found = json.loads(call(*flags, "--json", "--max-new", n))
    assert (found["cut"], found["points"]) == (True, [[1.0, "1", w / 2, h / 2]])
    whole = json.loads(call(*flags, "--json"))
    assert (whole["cut"], len(whole["points"])) == (False, 2)
    fake.answer = '<points coords="1 1 500 500 2 250'    # the model itself stops here
    assert json.loads(call(*flags, "--json"))["points"] == found["points"]
    fake.answer = '<points coords="1 1 500 500 2 250 750">x</points>'
    run_model("toy", *flags, "--max-new", n)
    assert f"the answer is cut at --max-new {n} tokens" in capsys.readouterr().err


def test_a_track_in_a_clip_is_asked_for_up_to_the_end_of_the_clip(call, fake, tmp_path):
    path = make_video(tmp_path / "a.mp4", n=60)          # 6 s
    call("--video", path, "--start", 2, "--end", 4, "--prompt", "video_point_track_per_frame: x")
    times = re.findall(r"([0-9.]+) <frame_start>", text_of(fake.prompts[0]))
    assert times == [f"{k / 10:.1f}" for k in range(20)]


def test_the_toy_is_asked_about_its_own_world_where_no_file_is_named(fake, capsys, tmp_path):
    """--model toy loads the weights in the repository, from any directory. Another seed gives
    another image."""
    fake.answer = '<points coords="1 1 500 500">any shape</points>'
    picture = tmp_path / "points.png"
    for seed in (0, 1):
        run_model("toy", "--prompt", "pointing: any shape", "--seed", seed, "--draw", picture)
    printed = capsys.readouterr()
    assert printed.out == f"{fake.answer}\n-> {picture}\n" * 2
    assert printed.err == ""
    assert Image.open(picture).size == (300, 300)
    first, other = (prompt.images for prompt in fake.prompts)
    assert not np.array_equal(first, other)

    fake.answer = '<points coords="1 1 56 1 55">e aur</points>'
    run_model("toy", "--prompt", "pointing: any shape", "--draw", picture)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"-> {picture} (no point could be read in the answer)"

    fake.answer = '<tracks coords="0.0 1 100 100;0.5 1 200 200">any shape</tracks>'
    prompt = "video_point_track_per_frame: any shape"
    run_model("toy", "--video", "--prompt", prompt, "--draw", tmp_path / "tracks.gif")
    record = world.SOURCES["tracks"]("test")[0]
    n_frames = len(read_headers(record, DATA).times)
    assert len(fake.prompts[-1].images) == n_frames
    with Image.open(tmp_path / "tracks.gif") as film:
        assert film.n_frames == n_frames
        film.seek(1)
        # in frame 1, a line connects the first and second point of the track
        assert film.convert("RGB").getpixel((45, 45)) == pytest.approx(pictures.COLOURS[0], abs=40)


@pytest.fixture(scope="module")
def toy_tracks(tmp_path_factory):
    """-> a toy record with tracks, and its video as a file with two frames per second."""
    source = world.SOURCES["tracks"]("test")
    record = source[0]
    _, _, duration, half_frame = source.video_size(record)
    times = np.arange(0, duration, 2 * half_frame)
    frames = [Image.fromarray(frame) for frame in source.frames(record, times)]
    path = tmp_path_factory.mktemp("toy") / "video.gif"
    milliseconds = round(2000 * half_frame)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    assert len(media.probe(path).times) == len(frames)
    return record, path


def test_a_tracking_question_sees_the_frames_of_training(call, fake, toy_tracks):
    """vision.track_times does not return the end of the video, which other prompts contain."""
    record, path = toy_tracks
    trained = read_headers(record, DATA).times
    prompt = "video_point_track_per_frame: any shape"
    call("--video", path, "--prompt", prompt)
    call("--video", path, "--prompt", "video_point: any shape")
    shown = [prompt.pool_dst.size // len(vision.frame_windows(VISION)) for prompt in fake.prompts]
    assert shown == [len(trained), len(trained) + 1]
    begins = "".join(f"{' ' if t else ']'}{t:.1f} {FRAME}" for t in trained)
    assert text_of(fake.prompts[0]).startswith(f"{begins}[user\n{prompt}]")


def test_an_answer_is_printed_as_it_grows_and_never_half_a_character(call, fake, capsys):
    fake.answer = "zwölf Äpfel 🍎 im Korb"
    printer = generate.make_printer(TOKENIZER)
    ids = TOKENIZER.encode(fake.answer)
    parts = []
    for n in range(1, len(ids) + 1):
        printer(ids[:n])
        parts.append(capsys.readouterr().out)
    assert "".join(parts) == fake.answer
    assert "\ufffd" not in "".join(parts)
    assert len([part for part in parts if part]) == len(fake.answer)
    assert call("--prompt", "What?") == fake.answer + "\n"


def test_a_conversation_is_held_over_standard_input(call, fake, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\n\nnever asked\n"))
    out = call("--image", PHOTOS[0], "--chat", "--temperature", 0.5, "--top-p", 0.9,
               "--frequency-penalty", 0.1, "--seed", 4, "--dtype", "bfloat16")
    assert fake.options == (torch.bfloat16, Sampling(0.5, 0.9, 0.1, 4))
    assert out == "fine\nfine\n"
    first, second = fake.prompts
    asked = "[user\nOne?]\n[assistant\nfine]]\n[user\nTwo?]\n[assistant\n"
    assert text_of(second).endswith(asked)
    assert np.array_equal(first.images, second.images)


def test_a_system_text_opens_the_first_question_behind_its_style(call, fake, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("user_qa 9: One?\nuser_qa: Two?\n\n"))
    call("--chat", "--system", "Be brief.")
    assert text_of(fake.prompts[1]) == (
        "][user\nuser_qa 9: System: Be brief.\nOne?]\n[assistant\nfine]]\n"
        "[user\nuser_qa: Two?]\n[assistant\n")


def test_the_first_question_of_a_conversation_alone_needs_a_style(fake, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("long_caption:\nWhy?\n\n"))
    run_model("toy", "--chat")
    assert len(fake.prompts) == 2
    assert "style" not in capsys.readouterr().err


def test_a_prompt_without_a_style_is_noted_where_the_model_knows_none(fake, capsys):
    run_model("toy", "--prompt", "Where are the shapes?")
    assert "trained on prompts that begin with a style" in capsys.readouterr().err
    for prompt in ("long_caption 65:", "pointing: any shape"):
        assert answer.style_hint(prompt, DATA) == ""
    assert answer.style_hint("long_captoin:", DATA) == (
        "unknown style 'long_captoin' - did you mean 'long_caption'?")
    with pytest.raises(UserError, match="image: give the path of a file, or a list of paths"):
        answer.load("toy").answer("long_caption:", image=Image.new("1", (9, 9)))


def test_a_folder_gives_one_line_per_file_and_a_second_start_continues(
        call, fake, saved_run, tmp_path, monkeypatch, capsys):
    """20 files, of which one is broken. The first start is killed in the middle of a line."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(20):
        Image.new("RGB", (30, 20), (9 * k, 0, 0)).save(folder / f"{k:02}.png")
    (folder / "07.png").write_bytes((folder / "07.png").read_bytes()[:60])
    (folder / ".DS_Store").write_bytes(b"of macOS")
    out = folder / "answers.jsonl"
    flags = "--image", folder, "--prompt", "pointing: x", "--out", out
    fake.answer = '<points coords="1 1 500 500">x</points>'
    encode_prompt = answer.encode_prompt

    def interrupted(*args):
        if len(fake.prompts) == 11:
            raise KeyboardInterrupt
        return encode_prompt(*args)

    monkeypatch.setattr(answer, "encode_prompt", interrupted)
    with pytest.raises(SystemExit):
        call(*flags)
    assert f": interrupted; the same command continues {out}\n" in capsys.readouterr().err
    assert out.read_bytes().count(b"\n") == 11
    with open(out, "r+b") as file:
        file.truncate(out.stat().st_size - 9)
    monkeypatch.setattr(answer, "encode_prompt", encode_prompt)
    assert call(*flags) == f"{out}: 19 answers; 1 file could not be read\n"
    assert len(fake.prompts) == 20                  # the cut line was answered twice
    lines = [json.loads(line) for line in out.open()]
    names = [str(folder / f"{k:02}.png") for k in range(20) if k != 7]
    assert [line["file"] for line in lines] == names
    assert {str(line["points"]) for line in lines} == {"[[1.0, '1', 15.0, 10.0]]"}
    assert call(*flags[:3], "long_caption:", *flags[4:]).startswith(f"{out}: 38 answers")
    fake.prompts.clear()
    run_model(saved_run, *flags)
    assert not fake.prompts
    assert f"{folder / '07.png'}" in capsys.readouterr().err
    for mine in ("mine", '{"file": "a"}', '{"file": "a"}\n{"file": "b"}'):
        (tmp_path / "mine.jsonl").write_text(mine)
        with pytest.raises(SystemExit):
            call(*flags[:5], tmp_path / "mine.jsonl")
        assert "this command has not made this file" in capsys.readouterr().err
        assert (tmp_path / "mine.jsonl").read_text() == mine
