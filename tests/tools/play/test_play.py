"""tools.play: replies of the server, requests that it rejects, and the recorder of attention."""

import base64
import contextlib
import dataclasses
import http.client
import inspect
import io
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import attention
import packing
from evaluation.answer import style_hint
from evaluation.generate import Sampling, generate
from evaluation.prompts import encode_prompt
from tests.evaluation.small_model import (
    CONFIG,
    DATA,
    MEDIA,
    TOKENIZER,
    VISION,
    random_model,
)
from tests.test_layout import ROOT
from tests.training.processes import runs_until
from tools import model_flags
from tools.generate import open_toy_scene
from tools.play import __main__ as play
from tools.play import answers
from tools.play.__main__ import time_limit
from tools.play.recorder import AttentionRecorder
from toy.shapes import SIZE, render
from training.loader import text_example

MODEL = SimpleNamespace(config=CONFIG)  # the answers of these tests need no more of a model
GROUND = {"slope": [10, -20], "texture": 1, "period": 6, "noise": 3}
CIRCLE = {"colour": "white", "shape": "circle", "x": 30, "y": 60, "r": 18, "light": 0}
SCENE = {"objects": [CIRCLE], **GROUND}
ALL = ["pointing: any shape", "count: any shape", "long_caption:"]


@pytest.fixture(scope="module")
def port():
    """-> the port of a server that runs until the tests end."""
    opened = queue.SimpleQueue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play.webbrowser, "open", opened.put)
        patch.setattr(play, "time_limit", contextlib.nullcontext)  # it needs the main thread
        threading.Thread(target=play.main, args=[["--port", "0"]], daemon=True).start()
        address = opened.get(timeout=120)
        assert address.startswith("http://127.0.0.1:")
        yield int(address.rpartition(":")[2])


@pytest.fixture
def send(port):
    """send(body, method, **headers) -> status, text of the reply"""

    def run(body, method="POST", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, "/", body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    return run


@pytest.fixture
def reply_of(send):
    """reply_of(prompts, scene=.., ..) -> the reply as a dict"""

    def run(prompts, **shown):
        status, text = send(json.dumps({"prompts": prompts, **shown}))
        assert status == 200
        return json.loads(text)

    return run


def file_of(path, kind):
    content = base64.b64encode(path.read_bytes()).decode()
    return {"name": path.name, "url": f"data:{kind};base64,{content}"}


def test_a_scene_is_answered_and_marked(reply_of):
    reply = reply_of(ALL, scene=SCENE)
    assert [answer["verdict"] for answer in reply["answers"]] == [
        ["1 of 1 points right", "right"], ["count right", "right"], ["caption right", "right"]]
    assert reply["answers"][0]["points"] == [[1, "1", 0.3, 0.6]]
    assert "".join(reply["answers"][2]["tokens"]) == "white circle"
    with Image.open(io.BytesIO(base64.b64decode(reply["pictures"][0].partition(",")[2]))) as image:
        assert np.abs(np.array(image, int) - render(SCENE)).mean() < 3
    # (mean and four blocks, tokens, 25 + 25 visual tokens); shares are in millionths
    shares = np.array(reply["answers"][0]["shares"])
    assert shares.shape == (5, len(reply["answers"][0]["tokens"]), 50)
    assert shares.sum(-1).max() < 1e6
    assert shares[0] == pytest.approx(shares[1:].mean(0), abs=1)


def test_a_seed_draws_the_scene_of_tools_generate_and_two_tabs_do_not_mix(reply_of):
    with ThreadPoolExecutor() as tabs:
        replies = tabs.map(lambda seed: reply_of(ALL[1:2], scene=seed), range(3, 7))
    for seed, reply in enumerate(replies, 3):
        _, record = open_toy_scene(seed, is_video=False)
        assert reply["scene"] == record["source"].scene(record["index"])


def test_a_video_has_frames_and_true_tracks(reply_of):
    reply = reply_of(["video_point_track_per_frame: any shape"], video=5)
    shown, record = open_toy_scene(5, is_video=True)
    assert reply["times"] == shown.clip.times
    assert len(reply["pictures"]) == len(reply["times"])
    points = next(a["points"] for a in record["annotations"] if a.get("label") == "any shape")
    assert reply["true"] == [[p["t"], p["id"], p["x"] / SIZE, p["y"] / SIZE] for p in points]
    assert len(reply["answers"][0]["shares"][0][0]) == 16 * len(reply["times"])
    assert not reply["unusual"]


def test_files_are_read_and_leave_nothing_on_the_disk(reply_of, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    image = reply_of(["count: any shape"], file=file_of(MEDIA / "rocket.jpg", "image/jpeg"))
    assert image["size"] == list(Image.open(MEDIA / "rocket.jpg").size)
    assert image["times"] is None
    bunny = file_of(MEDIA / "bigbuckbunny.mp4", "video/mp4")
    video = reply_of(["video_count: any shape"], file=bunny)
    assert len(video["pictures"]) == len(video["times"]) > 5
    tracks = reply_of(["video_point_track_per_frame: any shape"], file=bunny)
    assert tracks["times"][:3] == [0, 0.5, 1]      # a track has two points per second
    assert tracks["times"] != video["times"]
    frames = [Image.new("RGB", (40, 30), (60 * k, 0, 0)) for k in range(4)]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)
    assert len(reply_of(["video_count: any shape"], file=file_of(path, "image/gif"))["times"]) == 5
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("body", "words"), [
    ("[" * 100_000, "recursion"),
    ({"scene": {**SCENE, "period": 0}, "prompts": ALL}, "division by zero"),
])
def test_a_request_that_cannot_be_used_is_a_sentence(send, body, words):
    status, text = send(body if isinstance(body, str) else json.dumps(body))
    sentence = json.loads(text)["error"]
    assert status == 200
    assert sentence.startswith("This request cannot be used: ")
    assert words in sentence


@pytest.mark.parametrize(("prompts", "sentence"), [
    ([], '"prompts" must be a list of 1 to 8 texts'),
    (["a"] * 9, '"prompts" must be a list of 1 to 8 texts'),
    (["red " * 1000, "blue " * 1201], "the prompt has 10,005 characters, but a request may have "
     "at most 10,000; give a shorter prompt"),
])
def test_prompts_that_cannot_be_used_are_a_sentence(reply_of, prompts, sentence):
    assert reply_of(prompts, scene=SCENE) == {"error": sentence}


def test_a_request_that_takes_too_long_is_ended():
    forever = itertools.repeat(0)
    with (pytest.raises(play.TooSlow, match=r"longer than 0.01 s; give a sho"), time_limit(0.01),
          contextlib.suppress(Exception)):  # as the code that decodes an image
        sum(0 for _ in forever)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_picture_is_sent_back_as_large_as_a_screen(tmp_path, reply_of):
    """JPEG has at most 65,500 pixels on a side."""
    path = tmp_path / "a.png"
    Image.new("RGB", (66_000, 660), "red").save(path)
    reply = reply_of(ALL[1:2], file=file_of(path, "image/png"))
    assert reply["size"] == [66_000, 660]
    with Image.open(io.BytesIO(base64.b64decode(reply["pictures"][0].partition(",")[2]))) as image:
        assert image.size == (2048, 20)


@pytest.mark.parametrize(("name", "kind", "sentence"), [
    ("a.png", "image/png", "a.png: Pillow finds no image in this file"),
    ("a.mp4", "video/mp4", "a.mp4: ffmpeg cannot read this file as a video"),
    ("a.gif", "image/gif", "a.gif: ffmpeg cannot read this file as a video"),
])
def test_a_file_that_cannot_be_read_is_a_sentence_with_its_name(reply_of, name, kind, sentence):
    error = reply_of(ALL, file={"name": name, "url": f"data:{kind};base64,AAAA"})["error"]
    assert error.startswith(sentence)
    assert tempfile.gettempdir() not in error


def test_pages_of_other_origins_and_large_bodies_are_refused(send, port):
    body = json.dumps({"scene": SCENE, "prompts": ALL[1:2]})
    for headers in ({"Origin": "http://evil.example"}, {"Host": f"evil.example:{port}"},
                    {"Origin": "null"}, {"Origin": f"http://127.0.0.1:{port + 1}"},
                    {"Origin": f"https://127.0.0.1:{port}"}, {"Host": "127.0.0.1.evil.example"}):
        assert send(body, **headers)[0] == 403
        assert send(None, "GET", **headers)[0] == 403
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert send(body, Host=host, Origin=f"http://{host}")[0] == 200
    assert send(None, **{"Content-Length": str(play.MAX_BODY + 1)})[0] == 413
    assert send(None, **{"Content-Length": "9" * 5000})[0] == 413  # int() rejects so many digits
    assert send(None, **{"Content-Length": "-1"})[0] == 413
    assert send(None, **{"Transfer-Encoding": "chunked"})[0] == 413  # without a length


def test_only_this_address_of_the_machine_is_served(port):
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_page_that_is_closed_is_no_error_of_the_server(monkeypatch):
    def handle(_):
        raise ConnectionResetError

    monkeypatch.setattr(BaseHTTPRequestHandler, "handle", handle)
    object.__new__(play.Handler).handle()


def test_the_page_is_one_file_that_needs_no_network(send, capsys):
    status, page = send(None, "GET")
    assert status == 200
    assert capsys.readouterr() == ("", "")         # requests are not logged
    start = json.loads(page.partition("const START = ")[2].partition(";")[0])
    assert start.pop("kinds")["colours"][:2] == ["red", "green"]
    assert start == {"toy": True, "styled": True, "grid": 10, "margin": 2}
    assert page.count("http://www.w3.org/") == page.count("http")
    assert "src=" not in page.partition("<script>")[0]


@pytest.mark.parametrize(("prompt", "text", "verdict"), [
    ("pointing: any shape", '<points coords="1 1 300 600 2 700 200">', "2 of 2 points right"),
    ("pointing: any shape", '<points coords="1 1 300 600 2 800 900">', "1 of 2 points right"),
    ("pointing: any circle", '<points coords="1 1 300 600 2 700 200">', "1 of 2 points right"),
    ("pointing: red cross", '<points coords="1 1 700 200">', "1 of 1 points right"),
    ("pointing: blue cross", "There are none.", "0 of 0 points right"),
    ("count: red shape", "1", "count right"),
    ("count: any shape", "3", "count wrong"),
    ("long_caption:", "white circle, red cross", "caption right"),
    ("long_caption:", "red cross, white circle", "caption wrong"),
    ("pointing: shapes", '<points coords="1 1 300 600">', None),  # which ones?
    ("count: circle", "1", None),
    ("Where is it?", "there", None),
])
def test_an_answer_is_marked_by_the_scene(prompt, text, verdict):
    objects = [{**CIRCLE, "colour": "red", "shape": "cross", "x": 70, "y": 20}, CIRCLE]
    sentence, kind = answers.mark(prompt, text, {"objects": objects}, []) or (None, None)
    assert sentence == verdict
    is_right = verdict and "wrong" not in verdict and not verdict.startswith("1 of 2")
    assert kind == (verdict and ("right" if is_right else "wrong"))


@pytest.mark.parametrize(("prompt", "text", "verdict"), [
    ("video_point_track_per_frame: any shape",
     '<tracks coords="0.0 1 300 600;0.5 1 360 600 2 700 200">', ("3 of 3 points right", "right")),
    ("video_point_track_per_frame: any shape",
     '<tracks coords="0.0 1 300 600;0.5 1 400 600;1.0 1 300 600">',
     ("1 of 3 points right", "wrong")),
    ("video_point_track_per_frame: red cross", "", None),
    ("video_count: any shape", "2", ("count right", "right")),
    ("video_count: any shape", "3", ("count wrong", "wrong")),
])
def test_an_answer_about_a_video_is_marked_by_its_tracks(prompt, text, verdict):
    """A point may be 5 % of the diagonal, 7 pixels, from the true one at its time."""
    true = [(0.0, 1, 0.3, 0.6), (0.5, 1, 0.3, 0.6), (0.5, 2, 0.7, 0.2)]
    assert answers.mark(prompt, text, None, true) == verdict


def test_a_scene_is_unusual_if_shapes_touch_or_are_more_than_in_training():
    row = [{**CIRCLE, "x": x, "r": 5} for x in range(10, 100, 20)]
    assert [answers.is_unusual(row[:n]) for n in (0, 4, 5)] == [False, False, True]
    assert answers.is_unusual([row[0], {**row[1], "x": 20}])


def test_an_answer_at_the_token_limit_is_called_cut_and_its_points_are_shown(reply_of, monkeypatch):
    whole = reply_of(ALL[:1], scene=SCENE)["answers"][0]
    n = whole["tokens"].index('">')
    monkeypatch.setattr(answers, "MAX_NEW", n)
    cut = reply_of(ALL[:1], scene=SCENE)["answers"][0]
    assert cut["tokens"] == whole["tokens"][:n]
    assert (whole["hint"], cut["hint"]) == ("", f"the answer is cut at {n} tokens")
    assert cut["points"] == whole["points"]
    assert cut["verdict"] is None


def test_a_prompt_without_a_style_has_the_hint_of_tools_generate(reply_of):
    styled, free = (reply_of([prompt], scene=SCENE)["answers"][0]
                    for prompt in (ALL[1], "How many?"))
    assert styled["hint"] == ""
    assert free["hint"] == style_hint("How many?", DATA) != ""


def test_a_character_of_several_tokens_is_shown_by_its_last_one(monkeypatch):
    ids = TOKENIZER.encode("é 🍎")
    monkeypatch.setattr(answers, "generate", lambda *_, **__: [ids])
    monkeypatch.setattr(AttentionRecorder, "shares", lambda *_: torch.zeros(2, len(ids), 99))
    reply = answers.reply_to({"prompts": ["x"], "scene": SCENE}, (MODEL, TOKENIZER, DATA), None)
    assert reply["answers"][0]["tokens"] == ["", "é", " ", "", "", "", "🍎"]


def test_shares_are_those_of_the_visual_tokens_of_the_prompt(monkeypatch):
    places = torch.arange(99).expand(2, 1, -1) / 1e6  # replaces the shares of all tokens
    monkeypatch.setattr(answers, "generate", lambda *_, **__: [[1]])
    monkeypatch.setattr(AttentionRecorder, "shares", lambda *_: places)
    reply = answers.reply_to({"prompts": ["x"], "scene": SCENE}, (MODEL, TOKENIZER, DATA), None)
    prompt = encode_prompt([render(SCENE)], [("x", None)], TOKENIZER, DATA, VISION)
    assert reply["answers"][0]["shares"] == [[prompt.pool_dst.tolist()]] * 3


def test_a_wide_image_is_tiled_by_more_crops_across_than_down(monkeypatch):
    monkeypatch.setattr(answers, "generate", lambda *_, **__: [[]])
    monkeypatch.setattr(AttentionRecorder, "shares", lambda *_: torch.zeros(2, 0, 999))
    request = {"prompts": ["x"], "file": file_of(MEDIA / "coffee.png", "image/png")}
    config = dataclasses.replace(DATA, max_crops=8)
    reply = answers.reply_to(request, (MODEL, TOKENIZER, config), None)
    assert (reply["size"], reply["tiling"]) == ((600, 400), (2, 4))


def test_the_prompts_of_a_request_share_the_crops_of_its_picture(monkeypatch):
    found = []
    monkeypatch.setattr(answers, "generate", lambda _, prompts, *__, **___: found.extend(prompts))
    with contextlib.suppress(TypeError):           # since there are no answers
        answers.reply_to({"prompts": ALL, "scene": SCENE}, (MODEL, TOKENIZER, DATA), None)
    assert len({id(prompt.images) for prompt in found}) == 1 < len(found)


def test_many_shares_are_sent_as_their_mean(monkeypatch, reply_of):
    monkeypatch.setattr(answers, "MAX_SHARES", 300)  # the count has fewer: 4 x 50 for one token
    assert [len(answer["shares"]) for answer in reply_of(ALL[:2], scene=SCENE)["answers"]] == [1, 1]
    assert len(reply_of(ALL[1:2], scene=SCENE)["answers"][0]["shares"]) == 5


def test_the_model_is_run_with_the_limits_of_inference(monkeypatch, send):
    monkeypatch.setattr(play, "reply_to", lambda _, loaded, __: loaded[2].max_frames)
    assert send("{}") == (200, "384")


def whole_pass(model, prompt, ids, monkeypatch):
    """-> the same as AttentionRecorder.shares, from one pass over prompt and answer."""
    n = len(prompt.tokens)
    total = n + len(ids)
    whole = dataclasses.replace(
        text_example(np.array([*prompt.tokens, *ids]), 0), images=prompt.images,
        image_id=prompt.image_id, pool_src=prompt.pool_src, pool_dst=prompt.pool_dst,
        bidir=np.pad(prompt.bidir, (0, len(ids))))
    batch = packing.collate([[whole]], total, VISION).to(model.norm.weight.device)
    allowed = attention.allow(batch.visible_until, batch.bidir)
    found = []

    def attend(q, k, v, mask):
        k_of_head = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        score = torch.einsum("bqhd,bkhd->bhqk", q, k_of_head) / q.shape[3] ** 0.5
        found.append(score.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)[0].mean(0))
        return attention.attend(q, k, v, mask)

    monkeypatch.setattr(model, "attend", attend)
    with torch.no_grad():
        model.hidden(batch)
    return torch.stack(found)[:, n - 1 : total - 1, :n].cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device"))])
def test_recorded_attention_equals_that_of_a_whole_pass(monkeypatch, device):
    """The prompts have different lengths, so their rows have padding."""
    model = random_model().to(device)
    prompts = [encode_prompt([render(SCENE)], [(text, None)], TOKENIZER, DATA, VISION)
               for text in ("long_caption:", "a much longer question about the picture?")]
    recorder = AttentionRecorder()
    found = generate(model, prompts, {-1}, 5, recorder=recorder)
    assert found == generate(model, prompts, {-1}, 5)
    for row, (prompt, ids) in enumerate(zip(prompts, found, strict=True)):
        shares = recorder.shares(row, len(ids))
        torch.testing.assert_close(shares, whole_pass(model, prompt, ids, monkeypatch))
        assert recorder.shares(row, 0).shape == (2, 0, len(prompt.tokens))


def test_the_lines_of_the_page_and_the_recorder_are_short():
    page = (ROOT / "tools/play/page.html").read_text(encoding="utf-8").splitlines()
    assert max(map(len, page)) <= 100
    assert len(inspect.getsource(AttentionRecorder).splitlines()) <= 30


def test_the_flags_reach_the_model_and_a_core_is_left_to_the_browser(monkeypatch):
    given = []

    def open_model(args):
        given.extend([args.model, args.device, args.dtype, model_flags.sampling(args)])
        raise ValueError("that is all")

    monkeypatch.setattr(play, "open_model", open_model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with pytest.raises(SystemExit, match="2"):
        play.main(["--model=x", "--device=cuda", "--dtype=bfloat16", "--temperature=0.5",
                   "--top-p=0.9", "--frequency-penalty=0.2", "--seed=3"])
    assert given == [3, "x", "cuda", "bfloat16", Sampling(0.5, 0.9, 0.2, 3)]


def test_instead_of_a_port_in_use_the_next_free_one_is_taken(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with play.open_server(port) as server:
            assert port < server.server_port < port + play.N_PORTS
        assert f"--port {port} is in use, so this is port" in capsys.readouterr().out
        monkeypatch.setattr(play, "N_PORTS", 1)
        with pytest.raises(SystemExit, match="2"):
            play.main(["--port", str(port), "--no-browser"])
    assert f"--port {port}: it is in use" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_in_the_middle_of_an_answer(tmp_path, sent, status):
    """The file of the user does not stay in the temporary folder."""
    command = [sys.executable, "-m", "tools.play", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        port = int(server.stdout.readline().split()[0].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        film = file_of(MEDIA / "bigbuckbunny.mp4", "video/mp4")
        connection.request("POST", "/", json.dumps({"prompts": ["x" * 1000] * 8, "file": film}))
        assert runs_until(server, lambda: list(tmp_path.glob("*/file")))
        server.send_signal(sent)
        assert server.wait(60) == status
        assert server.stderr.read() == ""
    assert not list(tmp_path.glob("*/file"))
