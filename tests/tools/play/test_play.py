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
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import attention
from evaluation.answer import load
from evaluation.generate import Sampling, embed_prompts, generate, mask_fields
from evaluation.prompts import encode_prompt
from records.errors import UserError
from tests.evaluation.small_model import CONFIG, DATA, MEDIA, TOKENIZER, VISION, random_model
from tests.test_layout import ROOT
from tests.tools.play.browser import serve
from tests.training.processes import runs_until
from tools import model_flags
from tools.play import __main__ as play
from tools.play import answers
from tools.play.__main__ import time_limit
from tools.play.recorder import AttentionRecorder
from toy.shapes import render

CIRCLE = {"colour": "white", "shape": "circle", "x": 30, "y": 60, "r": 18, "light": 0}
SCENE = {"objects": [CIRCLE], "slope": [10, -20], "texture": 1, "period": 6, "noise": 3}
POINT, COUNT, CAPTION = ALL = ["pointing: any shape", "count: any shape", "long_caption:"]
TRACK, COUNT_VIDEO = "video_point_track_per_frame: any shape", "video_count: any shape"


@pytest.fixture(scope="module")
def address():
    return serve().removeprefix("http://")


def send(address, body, method="POST", **headers):  # -> status, text of the reply
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, "/", body, headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


@pytest.fixture
def reply_of(address):
    """reply_of(prompts, scene=.., ..) -> the reply as a dict"""
    return lambda *prompts, **shown: json.loads(
        send(address, json.dumps({"prompts": prompts, **shown}))[1])


def file_of(path, kind):
    content = base64.b64encode(path.read_bytes()).decode()
    return {"name": path.name, "url": f"data:{kind};base64,{content}"}


def verdicts(reply):
    return [answer["verdict"][0] for answer in reply["answers"]]


def picture(reply):
    return Image.open(io.BytesIO(base64.b64decode(reply["pictures"][0].partition(",")[2])))


def test_scenes_and_videos_are_marked_and_each_token_has_its_attention(reply_of, monkeypatch):
    reply = reply_of(*ALL, scene=SCENE)
    assert verdicts(reply) == ["1 of 1 points right", "count right", "caption right"]
    assert reply["answers"][0]["points"] == [[1, "1", 0.3, 0.6]]
    assert "".join(reply["answers"][2]["tokens"]) == "white circle"
    assert np.abs(np.array(picture(reply), int) - render(SCENE)).mean() < 3
    # (mean and four blocks, tokens, 25 + 25 visual tokens); shares are in millionths
    shares = np.array(reply["answers"][0]["shares"])
    assert shares.shape == (5, len(reply["answers"][0]["tokens"]), 50)
    assert shares[0] == pytest.approx(shares[1:].mean(0), abs=1)
    monkeypatch.setattr(answers, "MAX_SHARES", 300)  # the count has fewer: 4 x 50 for one token
    for prompts, n in ([POINT, COUNT], 1), ([COUNT], 5):
        answered = reply_of(*prompts, scene=SCENE)["answers"]
        assert {len(answer["shares"]) for answer in answered} == {n}
    drawn = reply_of(*ALL, scene=4)  # the number is a seed
    assert verdicts(drawn) == ["2 of 2 points right", "count right", "caption right"]
    video = reply_of(TRACK, COUNT_VIDEO, video=0)
    assert verdicts(video) == ["12 of 12 points right", "count right"]
    assert len(video["answers"][1]["shares"][0][0]) == 16 * len(video["times"])


def test_files_are_read_and_leave_nothing_on_the_disk(reply_of, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wide, film = tmp_path / "a.png", tmp_path / "a.gif"
    Image.new("RGB", (66_000, 66), "red").save(wide)  # a JPEG has at most 65,500 pixels on a side
    reply = reply_of(COUNT, file=file_of(wide, "image/png"))
    assert (reply["size"], reply["times"]) == ([66_000, 66], None)
    assert picture(reply).size == (2048, 2)            # as large as a screen
    frames = [Image.new("RGB", (40, 30), (60 * k, 0, 0)) for k in range(4)]
    frames[0].save(film, save_all=True, append_images=frames[1:], duration=500)
    reply = reply_of(COUNT_VIDEO, file=file_of(film, "image/gif"))
    assert len(reply["pictures"]) == len(reply["times"]) == 5
    tracks = reply_of(TRACK, file=file_of(MEDIA / "bigbuckbunny.mp4", "video/mp4"))
    assert tracks["times"][:3] == [0, 0.5, 1]          # a track has two points per second
    assert {*tmp_path.iterdir()} == {wide, film}


@pytest.mark.parametrize(("request_", "sentence"), [
    ({"scene": {**SCENE, "period": 0}, "prompts": ALL}, "This request cannot be used: .*by zero"),
    ({"prompts": []}, '"prompts" must be a list of 1 to 8 texts'),
    ({"prompts": ["a"] * 9}, '"prompts" must be a list of 1 to 8 texts'),
    ({"prompts": ["red " * 1000, "blue " * 1201]}, "the prompt has 10,005 characters"),
    *(({"prompts": ALL, "file": {"name": "my.x", "url": f"data:{kind};base64,AAAA"}}, sentence)
      for kind, sentence in (("image/png", "my.x: Pillow finds no image in this file"),
                             ("video/mp4", "my.x: ffmpeg cannot read this file as a video"))),
])
def test_a_request_that_cannot_be_used_is_a_sentence(address, request_, sentence):
    status, reply = send(address, json.dumps(request_))
    assert status == 200
    assert re.match(sentence, json.loads(reply)["error"])
    assert tempfile.gettempdir() not in reply


def test_a_request_that_takes_too_long_is_ended():
    with (pytest.raises(play.TooSlow, match=r"longer than 0.01 s; give a sho"),
          time_limit(0.01), contextlib.suppress(Exception)):  # as where an image is decoded
        sum(0 for _ in itertools.repeat(0))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_only_the_page_of_this_machine_is_served_and_large_bodies_are_refused(address, capsys):
    body, port = json.dumps({"scene": SCENE, "prompts": [COUNT]}), int(address.partition(":")[2])
    for headers in ({"Origin": "http://evil.example"}, {"Host": f"evil.example:{port}"},
                    {"Origin": "null"}, {"Origin": f"http://127.0.0.1:{port + 1}"},
                    {"Origin": f"https://127.0.0.1:{port}"}, {"Host": "127.0.0.1.evil.example"}):
        assert send(address, body, **headers)[0] == 403
        assert send(address, None, "GET", **headers)[0] == 403
    for host in (address, f"localhost:{port}"):
        assert send(address, body, Host=host, Origin=f"http://{host}")[0] == 200
    for headers in ({"Content-Length": str(play.MAX_BODY + 1)}, {"Content-Length": "-1"},
                    {"Content-Length": "9" * 5000},     # int() rejects 5000 digits
                    {"Transfer-Encoding": "chunked"}):
        assert send(address, None, **headers)[0] == 413
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    status, page = send(address, None, "GET")
    assert (status, capsys.readouterr()) == (200, ("", ""))  # requests are not logged
    assert page.count("http://www.w3.org/") == page.count("http")  # it needs no network
    assert "src=" not in page.partition("<script>")[0]


def test_a_page_that_is_closed_is_no_error_of_the_server():
    closed = mock.Mock(side_effect=ConnectionResetError)
    with mock.patch.object(play.BaseHTTPRequestHandler, "handle", closed):
        object.__new__(play.Handler).handle()
    closed.assert_called_once()


@pytest.mark.parametrize(("prompt", "text", "verdict"), [
    ("pointing: red cross", '<points coords="1 1 700 200">', ("1 of 1 points right", "right")),
    ("pointing: blue cross", "There are none.", ("0 of 0 points right", "right")),
    (POINT, '<points coords="1 1 300 600 2 800 900">', ("1 of 2 points right", "wrong")),
    ("pointing: any circle", '<points coords="1 1 300 600 2 700 200">',
     ("1 of 2 points right", "wrong")),
    ("count: red shape", "2", ("count wrong", "wrong")),
    (CAPTION, "red cross, white circle", ("caption wrong", "wrong")),
    ("pointing: shapes", '<points coords="1 1 300 600">', None),  # which ones?
    ("count: circle", "1", None),
    ("Where is it?", "there", None),
    # of a video: a point may be 5 % of the diagonal, 7 pixels, from the true one at its time
    (TRACK, '<tracks coords="0.0 1 360 600;0.5 1 400 600;1.0 1 300 600">',
     ("1 of 3 points right", "wrong")),
    (COUNT_VIDEO, "3", ("count wrong", "wrong")),
    ("video_point_track_per_frame: red cross", "", None),
])
def test_an_answer_is_marked_if_the_right_one_is_known(prompt, text, verdict):
    scene = {"objects": [{**CIRCLE, "colour": "red", "shape": "cross", "x": 70, "y": 20}, CIRCLE]}
    shown = (scene, [])
    if "video" in prompt:
        shown = None, [(0.0, 1, 0.3, 0.6), (0.5, 1, 0.3, 0.6), (0.5, 2, 0.7, 0.2)]
    assert answers.mark(prompt, text, *shown) == verdict


def test_a_scene_is_unusual_if_shapes_touch_or_are_more_than_in_training():
    row = [{**CIRCLE, "x": x, "r": 5} for x in range(10, 100, 20)]
    assert [answers.is_unusual(row[:n]) for n in (0, 4, 5)] == [False, False, True]
    assert answers.is_unusual([row[0], {**row[1], "x": 20}])


def test_an_answer_at_the_token_limit_is_called_cut_and_its_points_are_shown(reply_of, monkeypatch):
    (whole,) = reply_of(POINT, scene=SCENE)["answers"]
    n = whole["tokens"].index('">')
    monkeypatch.setattr(answers, "MAX_NEW", n)
    (cut,) = reply_of(POINT, scene=SCENE)["answers"]
    assert cut["tokens"] == whole["tokens"][:n]
    assert (whole["hint"], cut["hint"]) == ("", f"the answer is cut at {n} tokens")
    assert (cut["points"], cut["verdict"]) == (whole["points"], None)


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
    assert given[0].images is given[1].images
    for answer in reply["answers"]:
        assert answer["tokens"] == ["", "é", " ", "", "", "", "🍎"]
        assert answer["shares"] == [[given[0].pool_dst.tolist()] * len(ids)] * 3


@torch.no_grad()
def whole_pass(model, prompt, ids):
    """-> the same as AttentionRecorder.shares, from one pass over prompt and answer."""
    n = len(prompt.tokens)
    x, batch, lengths = embed_prompts(model, [prompt])
    x = torch.cat([x, model.embed_tokens(torch.tensor([ids], device=x.device))], dim=1)
    allowed = attention.allow(*mask_fields(batch.bidir, lengths, n + len(ids)))
    found = []

    def attend(q, k, v, mask):
        k_of_head = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        score = torch.einsum("bqhd,bkhd->bhqk", q, k_of_head) / q.shape[3] ** 0.5
        found.append(score.masked_fill(~mask[:, None], float("-inf")).softmax(-1)[0].mean(0))
        return attention.attend(q, k, v, mask)

    position = torch.arange(n + len(ids), device=x.device)[None]
    model.transformer(x, position, allowed, [attend] * len(model.blocks))
    return torch.stack(found)[:, n - 1 : -1, :n].cpu()


def test_recorded_attention_equals_that_of_a_whole_pass():
    """The prompts have different lengths, so their rows have padding."""
    model = random_model().to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = [encode_prompt([render(SCENE)], [(text, None)], TOKENIZER, DATA, VISION)
               for text in ("long_caption:", "a much longer question about the picture?")]
    recorder = AttentionRecorder()
    found = generate(model, prompts, {-1}, 5, recorder=recorder)
    assert found == generate(model, prompts, {-1}, 5)
    for row, (prompt, ids) in enumerate(zip(prompts, found, strict=True)):
        shares = recorder.shares(row, len(ids))
        torch.testing.assert_close(shares, whole_pass(model, prompt, ids))
        assert recorder.shares(row, 0).shape == (2, 0, len(prompt.tokens))


def test_the_flags_reach_the_model_and_a_core_is_left_to_the_browser(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(model_flags, "load", lambda *args: given.extend(args) or load("toy"))
    monkeypatch.setattr(play, "reply_to", lambda _, __, sampling: given.append(sampling))
    address = serve("--model=x", "--device=cpu", "--dtype=bfloat16", "--temperature=0.5",
                    "--top-p=0.9", "--frequency-penalty=0.2", "--seed=3")
    assert send(address.removeprefix("http://"), "{}") == (200, "null")
    assert given == [3, "x", torch.device("cpu"), torch.bfloat16, Sampling(0.5, 0.9, 0.2, 3)]


def test_instead_of_a_port_in_use_the_next_free_one_is_taken(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with play.open_server(port) as server:
            assert port < server.server_port < port + play.N_PORTS
        assert f"--port {port} is in use, so this is port" in capsys.readouterr().out
        monkeypatch.setattr(play, "N_PORTS", 1)
        with pytest.raises(UserError, match=f"--port {port}: it is in use"):
            play.open_server(port)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_in_the_middle_of_an_answer(tmp_path, sent, status):
    """The file of the user does not stay in the temporary folder."""
    command = [sys.executable, "-m", "tools.play", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        address = server.stdout.readline().split()[0].removeprefix("http://")
        connection = http.client.HTTPConnection(address)
        film = file_of(MEDIA / "bigbuckbunny.mp4", "video/mp4")
        connection.request("POST", "/", json.dumps({"prompts": ["x" * 1000] * 8, "file": film}))
        assert runs_until(server, lambda: list(tmp_path.glob("*/file")))
        server.send_signal(sent)
        assert server.wait(60) == status
        assert server.stderr.read() == ""
    assert not list(tmp_path.glob("*/file"))
