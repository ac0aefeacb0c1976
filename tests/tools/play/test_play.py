"""tools.play: replies of the server, requests that it rejects, and the recorder of attention."""

import base64
import contextlib
import dataclasses
import http.client
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import attention
import packing
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
from tests.tools.play.browser import serve
from tests.training.processes import runs_until
from tools import model_flags
from tools.generate import open_toy_scene
from tools.play import __main__ as play
from tools.play import answers
from tools.play.__main__ import time_limit
from tools.play.recorder import AttentionRecorder
from toy.shapes import SIZE, render
from training.loader import text_example

CIRCLE = {"colour": "white", "shape": "circle", "x": 30, "y": 60, "r": 18, "light": 0}
SCENE = {"objects": [CIRCLE], "slope": [10, -20], "texture": 1, "period": 6, "noise": 3}
ALL = ["pointing: any shape", "count: any shape", "long_caption:"]
TRACK = "video_point_track_per_frame: any shape"


@pytest.fixture(scope="module")
def port():
    """-> the port of a server that runs until the tests end."""
    return int(serve().rpartition(":")[2])


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


def picture(reply):
    return Image.open(io.BytesIO(base64.b64decode(reply["pictures"][0].partition(",")[2])))


def test_a_scene_is_answered_and_marked_and_each_token_has_its_attention(reply_of):
    reply = reply_of(ALL, scene=SCENE)
    assert [answer["verdict"] for answer in reply["answers"]] == [
        ["1 of 1 points right", "right"], ["count right", "right"], ["caption right", "right"]]
    assert reply["answers"][0]["points"] == [[1, "1", 0.3, 0.6]]
    assert "".join(reply["answers"][2]["tokens"]) == "white circle"
    assert np.abs(np.array(picture(reply), int) - render(SCENE)).mean() < 3
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
    reply = reply_of([TRACK], video=5)
    shown, record = open_toy_scene(5, is_video=True)
    assert reply["times"] == shown.clip.times
    assert len(reply["pictures"]) == len(reply["times"])
    points = next(a["points"] for a in record["annotations"] if a.get("label") == "any shape")
    assert reply["true"] == [[p["t"], p["id"], p["x"] / SIZE, p["y"] / SIZE] for p in points]
    assert len(reply["answers"][0]["shares"][0][0]) == 16 * len(reply["times"])


def test_files_are_read_and_leave_nothing_on_the_disk(reply_of, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wide = tmp_path / "a.png"                      # JPEG has at most 65,500 pixels on a side
    Image.new("RGB", (66_000, 660), "red").save(wide)
    reply = reply_of(ALL[1:2], file=file_of(wide, "image/png"))
    assert (reply["size"], reply["times"]) == ([66_000, 660], None)
    assert picture(reply).size == (2048, 20)       # as large as a screen
    bunny = file_of(MEDIA / "bigbuckbunny.mp4", "video/mp4")
    video = reply_of(["video_count: any shape"], file=bunny)
    assert len(video["pictures"]) == len(video["times"]) > 5
    tracks = reply_of([TRACK], file=bunny)
    assert tracks["times"][:3] == [0, 0.5, 1]      # a track has two points per second
    assert tracks["times"] != video["times"]
    film = tmp_path / "a.gif"
    frames = [Image.new("RGB", (40, 30), (60 * k, 0, 0)) for k in range(4)]
    frames[0].save(film, save_all=True, append_images=frames[1:], duration=500)
    assert len(reply_of(["video_count: any shape"], file=file_of(film, "image/gif"))["times"]) == 5
    assert {*tmp_path.iterdir()} == {wide, film}


@pytest.mark.parametrize(("request_", "sentence"), [
    ({"scene": {**SCENE, "period": 0}, "prompts": ALL}, "This request cannot be used: .*by zero"),
    ({"prompts": []}, '"prompts" must be a list of 1 to 8 texts'),
    ({"prompts": ["a"] * 9}, '"prompts" must be a list of 1 to 8 texts'),
    ({"prompts": ["red " * 1000, "blue " * 1201]}, "the prompt has 10,005 characters, but a "
     "request may have at most 10,000; give a shorter prompt"),
    *(({"prompts": ALL, "file": {"name": "my.x", "url": f"data:{kind};base64,AAAA"}}, sentence)
      for kind, sentence in (("image/png", "my.x: Pillow finds no image in this file"),
                             ("video/mp4", "my.x: ffmpeg cannot read this file as a video"),
                             ("image/gif", "my.x: ffmpeg cannot read this file as a video"))),
])
def test_a_request_that_cannot_be_used_is_a_sentence(reply_of, request_, sentence):
    error = reply_of(**request_)["error"]
    assert re.match(sentence, error)
    assert tempfile.gettempdir() not in error


def test_a_request_that_takes_too_long_is_ended():
    forever = itertools.repeat(0)
    with (pytest.raises(play.TooSlow, match=r"longer than 0.01 s; give a sho"), time_limit(0.01),
          contextlib.suppress(Exception)):  # as the code that decodes an image
        sum(0 for _ in forever)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_only_the_page_of_this_machine_is_served_and_large_bodies_are_refused(send, port):
    body = json.dumps({"scene": SCENE, "prompts": ALL[1:2]})
    for headers in ({"Origin": "http://evil.example"}, {"Host": f"evil.example:{port}"},
                    {"Origin": "null"}, {"Origin": f"http://127.0.0.1:{port + 1}"},
                    {"Origin": f"https://127.0.0.1:{port}"}, {"Host": "127.0.0.1.evil.example"}):
        assert send(body, **headers)[0] == 403
        assert send(None, "GET", **headers)[0] == 403
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert send(body, Host=host, Origin=f"http://{host}")[0] == 200
    # int() rejects 5000 digits
    for headers in ({"Content-Length": str(play.MAX_BODY + 1)}, {"Content-Length": "9" * 5000},
                    {"Content-Length": "-1"}, {"Transfer-Encoding": "chunked"}):
        assert send(None, **headers)[0] == 413
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_page_is_one_file_that_needs_no_network(send, capsys):
    status, page = send(None, "GET")
    assert status == 200
    assert capsys.readouterr() == ("", "")         # requests are not logged
    start = json.loads(page.partition("const START = ")[2].partition(";")[0])
    assert start.pop("kinds")["colours"][:2] == ["red", "green"]
    assert start == {"toy": True, "styled": True, "grid": 10, "margin": 2}
    assert page.count("http://www.w3.org/") == page.count("http")
    assert "src=" not in page.partition("<script>")[0]
    assert max(map(len, (ROOT / "tools/play/page.html").read_text().splitlines())) <= 100


def test_a_page_that_is_closed_is_no_error_of_the_server(monkeypatch):
    def handle(_):
        raise ConnectionResetError

    monkeypatch.setattr(BaseHTTPRequestHandler, "handle", handle)
    object.__new__(play.Handler).handle()


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
    # of a video: a point may be 5 % of the diagonal, 7 pixels, from the true one at its time
    (TRACK, '<tracks coords="0.0 1 300 600;0.5 1 360 600 2 700 200">', "3 of 3 points right"),
    (TRACK, '<tracks coords="0.0 1 300 600;0.5 1 400 600;1.0 1 300 600">', "1 of 3 points right"),
    ("video_point_track_per_frame: red cross", "", None),
    ("video_count: any shape", "2", "count right"),
    ("video_count: any shape", "3", "count wrong"),
])
def test_an_answer_is_marked_if_the_right_one_is_known(prompt, text, verdict):
    scene, true = {"objects": [{**CIRCLE, "colour": "red", "shape": "cross", "x": 70, "y": 20},
                               CIRCLE]}, []
    if prompt.startswith("video"):
        scene, true = None, [(0.0, 1, 0.3, 0.6), (0.5, 1, 0.3, 0.6), (0.5, 2, 0.7, 0.2)]
    sentence, kind = answers.mark(prompt, text, scene, true) or (None, None)
    assert sentence == verdict
    is_wrong = verdict and ("wrong" in verdict or verdict[:6] in ("1 of 2", "1 of 3"))
    assert kind == (verdict and ("wrong" if is_wrong else "right"))


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


def test_many_shares_are_sent_as_their_mean(monkeypatch, reply_of):
    monkeypatch.setattr(answers, "MAX_SHARES", 300)  # the count has fewer: 4 x 50 for one token
    assert [len(answer["shares"]) for answer in reply_of(ALL[:2], scene=SCENE)["answers"]] == [1, 1]
    assert len(reply_of(ALL[1:2], scene=SCENE)["answers"][0]["shares"]) == 5


def test_texts_and_shares_belong_to_their_tokens(monkeypatch):
    """A character of several tokens is shown by its last one. The crops are encoded once."""
    ids, given = TOKENIZER.encode("é 🍎"), []
    shares = torch.arange(999.0).expand(2, len(ids), -1) / 1e6      # replaces those of all tokens
    monkeypatch.setattr(AttentionRecorder, "shares", lambda *_: shares)
    monkeypatch.setattr(answers, "generate", lambda _, prompts, *__, **___: (
        given.extend(prompts) or [ids] * len(prompts)))
    config = dataclasses.replace(DATA, max_crops=8)
    model = SimpleNamespace(config=CONFIG)  # nothing else of it is used
    reply = answers.reply_to({"prompts": ["x", "y"], "file": file_of(
        MEDIA / "coffee.png", "image/png")}, (model, TOKENIZER, config), None)
    assert (reply["size"], reply["tiling"]) == ((600, 400), (2, 4))
    assert len({id(prompt.images) for prompt in given}) == 1
    for answer in reply["answers"]:
        assert answer["tokens"] == ["", "é", " ", "", "", "", "🍎"]
        assert answer["shares"] == [[given[0].pool_dst.tolist()] * len(ids)] * 3


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
