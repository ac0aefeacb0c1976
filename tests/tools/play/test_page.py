"""The page of tools.play in a browser: what a user does, and what the page then shows."""

import base64
import io
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.small_model import MEDIA, save_run
from tests.extras import require
from tests.tools.play.browser import ARE_MISSING, HOW_TO_INSTALL, Window, serve
from text.tokenizer import ByteTokenizer

pytestmark = [require("selenium"), pytest.mark.skipif(ARE_MISSING, reason=HOW_TO_INSTALL)]
SCENE = """shown.scene = {slope: [10, -20], texture: 1, period: 6, noise: 3, objects: [
    {colour: "white", shape: "circle", x: 30, y: 60, r: 18, light: 0},
    {colour: "purple", shape: "square", x: 75, y: 25, r: 16, light: 0}]}; drawShapes(); update();"""
RINGS = """return [...document.querySelectorAll("#marks circle[stroke='#fff']")].map(
    ring => [ring.getAttribute("cx") / 10, ring.getAttribute("cy") / 10])"""
SQUARES = "return document.querySelectorAll('#marks rect[fill]').length"
UNDERLINED = "return [...document.querySelectorAll('.now')].map(s => s.textContent).join('')"
DROP = """const files = new DataTransfer();
files.items.add(new File(["no image"], "notes.txt", {type: "text/plain"}));
document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true}));"""
# the server does not answer before release() is called; window.bodies has all requests
STOPPED = """window.bodies = [];
const plain = fetch, pause = new Promise(resolve => { window.release = resolve; });
window.fetch = (url, options) => {
  bodies.push(JSON.parse(options.body));
  return pause.then(() => plain(url, options));
};"""
RIGHT, LEFT, DOWN, DELETE, ENTER = "\ue014", "\ue012", "\ue015", "\ue017", "\ue007"


@pytest.fixture(scope="module")
def address():
    return serve()


@pytest.fixture(scope="module")
def browser():
    window = Window()
    yield window
    window.driver.quit()


@pytest.fixture
def page(browser, address):
    """A new page with a scene of two shapes. At the end, its console must be empty."""
    browser.resize(1180, 900)
    browser.open(address)
    browser.run(SCENE)
    browser.wait()
    yield browser
    assert browser.driver.get_log("browser") == []


def text(page, selector):
    return " ".join(element.text for element in page.find(selector))


def keys(page, *keys):
    page.actions().send_keys(*keys).perform()
    page.wait()


def test_rings_follow_a_shape_that_is_dragged(page):
    assert page.run(RINGS) == [[30, 60], [75, 25]]
    side = page.run("return $('stage').clientWidth")
    circle = page.find(".shape")[0]
    page.actions().drag_and_drop_by_offset(circle, round(side / 5), round(side / 10)).perform()
    page.wait()
    assert page.run(RINGS) == [[50, 70], [75, 25]]
    assert text(page, ".answer b") == "2 of 2 points right count right caption right"
    assert text(page, "#about") == ""
    page.run("Object.assign(objects()[0], {x: 60, y: 40}); update()")
    page.wait()
    assert text(page, "#about").startswith("The training images have at most four shapes")


def test_keys_move_and_delete_a_shape_and_buttons_add_one(page):
    page.run("document.querySelector('.shape').focus()")
    keys(page, RIGHT, RIGHT, DOWN, LEFT)
    assert page.run(RINGS)[0] == [35, 65]
    assert page.find(".shape")[0].get_attribute("aria-label") == "white circle at 35, 65"
    keys(page, DELETE)
    assert page.run(RINGS) == [[75, 25]]
    page.click("#add")
    assert text(page, ".answer:nth-child(2) .tokens") == "2"
    before = page.find("#picture")[0].get_attribute("src")
    page.click("#ground")
    assert page.find("#picture")[0].get_attribute("src") != before
    for _ in range(5):                   # with none selected, the last one is deleted
        page.click("#delete")
    assert text(page, ".answer b").startswith("0 of 0 points right")


def test_while_the_server_is_stopped_old_answers_are_dimmed_and_it_is_said_to_compute(page):
    page.run(STOPPED + "selected = 0; for (let x = 20; x <= 50; x++) move(x, 70, 1);")
    page.wait("$('answers').ariaBusy === 'true' && getComputedStyle($('answers')).opacity < 0.5")
    page.wait("$('time').textContent === 'The model computes the answers ..'")
    page.run("release()")
    page.wait()
    # the first change and the newest one, and no change between them
    assert page.run("return bodies.map(body => body.scene.objects[0].x)") == [20, 50]
    assert page.find("#answers")[0].get_attribute("aria-busy") == "false"
    assert re.fullmatch(r"\d+ ms from change to answers", text(page, "#time"))
    assert page.run(RINGS)[0] == [50, 70]
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); update()")
    page.wait()
    assert text(page, "#error").startswith("The server does not answer: start tools.play again")
    assert not [part for part in page.find("#stage, #add, #save") if part.is_displayed()]


def test_a_token_shows_what_the_model_attended_to(page):
    page.actions().move_to_element(page.find(".token")[2]).perform()
    assert page.run(SQUARES) == 50
    said = text(page, "#looked")
    assert re.search(r"gave \d+ % of its attention to the picture \(block: mean of all\)", said)
    page.find("#block")[0].send_keys("2")
    page.find(".token")[2].click()
    assert "(block: 2)" in text(page, "#looked")
    page.run("document.querySelector('.tokens').focus()")
    keys(page, RIGHT, RIGHT, LEFT)
    assert page.run("return looked[1]") == 3
    page.find("h1")[0].click()
    page.run("document.activeElement.blur()")
    assert page.run(SQUARES) == 0


def test_the_first_video_is_answered_right_and_plays_with_its_rings_and_answers(page):
    page.click("#video")
    assert text(page, ".answer b") == "12 of 12 points right count right"
    first = page.run(RINGS), page.run(UNDERLINED)
    assert first[1].strip() == "0.0 1 350 400 2 750 800"
    page.click("#play")
    page.wait("frame() === 1")
    assert page.run(RINGS)[1] == [75, 70]
    assert page.run(UNDERLINED).strip() == "0.5 1 350 400 2 750 700"
    page.wait("frame() === 5")
    page.wait("frame() === 0")           # it starts again
    assert (page.run(RINGS), page.run(UNDERLINED)) == first
    page.click("#play")
    assert (text(page, "#play"), page.run("return playing")) == ("Play", None)
    page.find("#true")[0].click()
    assert len(page.find("polyline[stroke='#fff']")) == 2


def test_the_page_says_what_the_toy_is_when_a_file_is_opened(page):
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait("mode === 'file' && !reply.scene")
    assert "trained only on coloured shapes" in text(page, "#about")
    page.run(DROP)
    page.wait("$('error').textContent")
    assert text(page, "#error") == "notes.txt: Pillow finds no image in this file"
    assert not page.find("#answers")[0].is_displayed()
    page.find("#file")[0].send_keys(str(MEDIA / "bigbuckbunny.mp4"))
    page.wait("reply.times")
    assert page.find("#play")[0].is_displayed()
    page.click("#scene")
    assert text(page, "#error") + text(page, "#about") == ""
    assert not page.find("#play")[0].is_displayed()


def test_a_note_on_a_prompt_has_buttons_with_prompts_that_fit(page):
    page.find("#prompt")[0].send_keys("Where is the purple square?" + ENTER)
    page.wait("reply.answers[0].prompt.startsWith('Where')")
    assert "trained on prompts that begin with a style" in text(page, ".answer i")
    page.click(".answer button")
    assert page.find("#prompt")[0].get_attribute("value") == "pointing: purple square"
    assert page.run(RINGS) == [[75, 25]]
    page.click("#usual button:last-child")
    assert len(page.find(".answer b")) == 3


def test_a_saved_picture_has_the_scene_the_rings_and_the_answers(page):
    url = page.driver.execute_async_script("savePicture().then(arguments[0])")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    assert image.width == 1000 < image.height
    assert image.getpixel((300 + 22, 600)) == (255, 0, 80)       # a ring around the circle
    below = image.crop((0, 1000, *image.size)).convert("L")
    assert below.getextrema() == (0, 255)


def test_nothing_is_wider_than_a_phone_or_a_large_screen(page):
    for width, button in itertools.product((360, 1600), ("#scene", "#video")):
        page.resize(width, 800)
        page.click(button)
        assert page.run("return document.documentElement.scrollWidth") == width


def test_a_model_of_another_world_answers_about_files_alone(page, tmp_path):
    save_run(tmp_path)
    ByteTokenizer(("x",)).save(tmp_path)
    page.driver.get(serve("--model", str(tmp_path)))
    assert not page.find("#scene")[0].is_displayed()
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait()
    assert text(page, "#about") == ""
    assert text(page, ".answer i") == " ".join(["Note: the answer is cut at 256 tokens"] * 2)


def test_a_screen_reader_hears_a_name_for_each_control_and_one_label_for_each_answer(page):
    page.click("#video")
    heard = {}
    for node in page.send("Accessibility.getFullAXTree", {})["nodes"]:
        can_have = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
        if can_have.get("focusable") and node["role"]["value"] != "RootWebArea":
            heard[node["name"]["value"].strip()] = node["role"]["value"]
    assert "" not in heard
    assert [name for name, role in heard.items() if role == "image"] == [
        f"Answer: {text(page, '.answer:nth-child(1) .tokens')}", "Answer: 2"]
    assert {"Prompt", "Frame", "Play", "Attention in block", "Save picture"} <= heard.keys()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_in_light_and_dark(page, scheme):
    """The contrast is the one of WCAG."""
    page.send("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    page.run("$('error').textContent = 'No answer'")
    for selector in (".tokens", ".answer .note", ".right b", "#error"):
        image = Image.open(io.BytesIO(page.find(selector)[0].screenshot_as_png)).convert("RGB")
        colours = np.array(image) / 255
        linear = np.where(colours > 0.04, ((colours + 0.055) / 1.055) ** 2.4, colours / 12.92)
        luminance = linear @ (0.2126, 0.7152, 0.0722)
        assert (np.median(luminance) > 0.5) == (scheme == "light")
        assert (luminance.max() + 0.05) / (luminance.min() + 0.05) > 4.5, selector
