"""The page of tools.play in a browser: actions of a user, and what the page shows."""

import base64
import io
import re

import pytest
from PIL import Image

from tests.evaluation.small_model import MEDIA, save_run
from tests.tools.play.browser import EXTRAS, Window, serve
from text.tokenizer import ByteTokenizer
from vision import image_windows

pytestmark = EXTRAS
SCENE = """shown.scene = {slope: [10, -20], texture: 1, period: 6, noise: 3, objects: [
    {colour: "white", shape: "circle", x: 30, y: 60, r: 18, light: 0},
    {colour: "purple", shape: "square", x: 75, y: 25, r: 16, light: 0}]}; drawShapes(); update();"""
# drops a file (content in base64) on the page -> would the browser open it itself?
DROP = """const [content, name, type] = arguments, files = new DataTransfer();
const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt());
files.items.add(new File([bytes], name, {type}));
return ["dragover", "drop"].map(event => document.body.dispatchEvent(
    new DragEvent(event, {dataTransfer: files, bubbles: true, cancelable: true})));"""


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
    assert browser.messages() == []


def places(page):
    """-> [[x, y], ..] of the shapes, in pixels of the scene."""
    return page.run("return objects().map(o => [o.x, o.y])")


def rings(page):
    """-> [[x, y], ..] of the points of the model, in pixels of the scene."""
    return page.run("""return [...document.querySelectorAll("#marks circle[stroke='#fff']")].map(
        ring => [ring.getAttribute("cx") / 10, ring.getAttribute("cy") / 10])""")


def squares(page):
    """-> [[x, y, width, height, opacity], ..] of the squares that show attention."""
    return page.run("""return [...document.querySelectorAll("#marks rect[fill]")].map(square =>
        ["x", "y", "width", "height", "opacity"].map(name => +square.getAttribute(name)))""")


def are_displayed(page, *ids):
    return [page.find(f"#{name}")[0].is_displayed() for name in ids]


def verdicts(page):
    return [element.text for element in page.find(".answer b")]


def test_rings_follow_a_shape_that_is_dragged(page):
    assert rings(page) == [[30, 60], [75, 25]]
    circle = page.find(".shape")[0]
    pixels = page.run("return $('stage').clientWidth / 100")
    drag = page.actions().move_to_element_with_offset(circle, 20, 10).click_and_hold()
    for _ in range(10):
        drag = drag.move_by_offset(round(2 * pixels), round(pixels))
    drag.release().perform()
    page.wait()
    assert places(page) == [[50, 70], [75, 25]]
    assert rings(page) == [[50, 70], [75, 25]]
    assert verdicts(page) == ["2 of 2 points right", "count right", "caption right"]
    page.actions().move_by_offset(-30, 0).perform()  # the mouse button is not pressed
    page.wait()
    assert places(page) == [[50, 70], [75, 25]]


def test_the_newest_change_wins_and_one_request_is_under_way(page):
    page.run("""window.most = window.now = window.n = 0;
        const plain = fetch;
        window.fetch = (...request) => {
          most = Math.max(most, ++now);
          n++;
          return plain(...request).finally(() => { now--; });
        };
        selected = 0;
        for (let x = 20; x <= 50; x++) move(x, 70, 1);""")
    page.wait()
    assert page.run("return [most, n]") == [1, 2]  # requests for the first and for the last change
    assert rings(page)[0] == [50, 70]


def test_the_time_counts_from_the_oldest_change_without_an_answer(page):
    page.run("""running = true;
        update();
        const end = performance.now() + 400;
        while (performance.now() < end);
        running = false;
        update();""")
    page.wait()
    words = page.find("#time")[0].text.split()
    assert int(words[0]) >= 400
    assert words[1:] == ["ms", "from", "change", "to", "answers"]


def test_answers_about_a_picture_that_is_no_longer_chosen_are_not_shown(page):
    page.run("""window.ofVideos = [];
        const plain = show;
        show = (found, sent) => {
          ofVideos.push(found.times !== null);
          plain(found, sent);
        };
        setMode("video", 0);
        setMode("scene", 1);""")
    page.wait()
    assert page.run("return ofVideos") == [False]


def test_keys_move_and_delete_a_shape(page):
    keys = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015",
            "delete": "\ue017", "backspace": "\ue003"}
    page.resize(1180, 400)  # the window is lower than the page: keys must not scroll it
    page.run("document.querySelector('.shape').focus({preventScroll: true})")
    page.actions().send_keys(keys["right"] * 2, keys["down"]).perform()
    page.wait()
    assert places(page)[0] == [40, 65]
    page.actions().send_keys(keys["left"], keys["up"] * 2).perform()
    page.wait()
    assert places(page)[0] == [35, 55]
    page.actions().send_keys(keys["down"] * 2).perform()
    page.wait()
    assert page.run("return scrollY") == 0
    page.actions().send_keys(keys["right"] * 20).perform()
    page.wait()
    assert places(page)[0] == [80, 65]             # the whole shape stays in the picture
    label = page.find(".shape")[0].get_attribute("aria-label")
    assert label == "white circle at 80, 65"
    page.actions().send_keys(keys["delete"]).perform()
    page.wait()
    assert places(page) == [[75, 25]]
    assert verdicts(page)[1] == "count right"
    page.actions().send_keys(keys["backspace"]).perform()  # the remaining shape is selected
    page.wait()
    assert places(page) == []
    assert verdicts(page)[0] == "0 of 0 points right"


def test_shapes_are_added_and_deleted_and_the_background_changes(page):
    page.run("$('colour').value = 'red'; $('shape').value = 'triangle'")
    page.click("#add")
    added = page.run("return objects()[2]")
    assert [added["colour"], added["shape"]] == ["red", "triangle"]
    assert page.run("return reply.answers[1].tokens.join('')") == "3"
    page.click("#delete")                          # the new shape is selected
    assert places(page) == [[30, 60], [75, 25]]
    before = page.run("return [shown.scene.noise, reply.pictures[0]]")
    page.click("#ground")
    after = page.run("return [shown.scene.noise, reply.pictures[0]]")
    assert before[0] != after[0] and before[1] != after[1]
    assert places(page) == [[30, 60], [75, 25]]
    page.click("#scene")
    assert page.run("return shown.scene.noise") not in (before[0], after[0])
    page.run("setMode('scene', 0)")                # a scene of three shapes
    page.wait()
    left = places(page)
    assert len(page.find(".shape")) == len(left) == 3
    while left:                                    # if none is selected, the last one is deleted
        page.click("#delete")
        assert places(page) == left[:-1]
        left.pop()
    page.click("#delete")


def test_a_token_shows_what_it_attended_to(page):
    token = page.find(".token")[2]
    page.actions().move_to_element(token).perform()
    mean = [square[4] for square in squares(page)]
    assert len(mean) == page.run("return shares().length") == 50
    assert max(mean) == pytest.approx(0.8)
    shares = page.run("return reply.answers[0].shares[0][2]")
    assert mean == pytest.approx([0.8 * share / max(shares) for share in shares])
    percent = page.run("return Math.round(shares().reduce((a, b) => a + b) / 1e4)")
    sentence = f"gave {percent} % of its attention to the picture (block: mean of all)"
    assert sentence in page.find("#looked")[0].text
    page.run("$('block').selectedIndex = 2; $('block').onchange()")
    assert [square[4] for square in squares(page)] != mean
    assert "(block: 2)" in page.find("#looked")[0].text
    page.actions().move_to_element(page.find("h1")[0]).perform()
    assert squares(page) == []
    page.run("document.querySelector('.answer:last-child .token').focus()")  # like the Tab key
    shares = page.run("return reply.answers[2].shares[2][0]")
    assert [square[4] for square in squares(page)] == pytest.approx(
        [0.8 * share / max(shares) for share in shares])
    # in new answers, no token is selected
    page.run("document.activeElement.blur(); looked = [reply.answers[0], 0]; update()")
    page.wait()
    assert squares(page) == []
    assert page.run("return $('block').value") == "2"


def test_there_is_a_square_for_every_visual_token_of_a_released_model(page):
    rows, columns = 2, 3
    n = len(image_windows(rows, columns))
    page.run(f"""Object.assign(START, {{grid: 27, margin: 4}});
        reply.tiling = [{rows}, {columns}];
        reply.answers[0].shares = [[Array({n}).fill(1)]];
        looked = [reply.answers[0], 0];
        draw();""")
    first, *_, last = found = squares(page)
    assert len(found) == n
    assert first[:4] == pytest.approx([0, 0, 2000 / 27, 2000 / 27])
    width, height = 1000 / (columns * 19 + 8), 1000 / (rows * 19 + 8)  # a patch of the mosaic
    # 65 patches in windows of 2: half of the last window is outside
    assert last[:4] == pytest.approx([1000 - width, 1000 - 2 * height, 2 * width, 2 * height])


def test_a_video_shows_its_tracks_up_to_the_frame_of_the_slider(page):
    page.run("setMode('video', 0)")
    page.wait()
    for frame, time in enumerate(page.run("return reply.times")):
        page.run(f"$('frame').value = {frame}; $('frame').oninput()")
        points = page.run("return reply.answers[0].points")
        here = [[100 * x, 100 * y] for t, _, x, y in points if t == time]
        assert rings(page) == [pytest.approx(point) for point in here]
        assert page.find("#second")[0].text == f"{time:.1f} s"
        assert page.run("return $('picture').src === reply.pictures[arguments[0]]", frame)
    assert page.run("return new Set(reply.pictures).size") > 2
    page.run("looked = [reply.answers[0], 0]; draw()")
    assert "of its attention to all frames" in page.find("#looked")[0].text
    # 10 patches in 4 windows of 3, which start one patch outside
    assert len(squares(page)) == 4 * 4
    assert squares(page)[0][:4] == pytest.approx([-100, -100, 300, 300])
    lines = "return [...$('marks').querySelectorAll('polyline')].map(l => l.getAttribute('stroke'))"
    tracks = page.run("return [...new Set(reply.answers[0].points.map(point => point[1]))]")
    assert "#fff" not in page.run(lines)
    assert len(set(page.run(lines))) == len(tracks) > 1  # one colour per track
    page.run("reply.answers[0].points = reply.answers[0].points.filter(p => p[0] < 1); draw()")
    assert (len(page.run(lines)), rings(page)) == (len(tracks), [])  # tracks end before this frame
    page.find("#true")[0].click()
    n_true = page.run("return new Set(reply.true.map(point => point[1])).size")
    assert page.run(lines).count("#fff") == n_true > 0
    page.run("setMode('video', 1)")                # another video starts at its first frame
    page.wait()
    assert page.find("#second")[0].text == "0.0 s"


def test_files_are_chosen_or_dropped_and_what_is_no_image_is_a_sentence(page):
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait("mode === 'file' && reply.scene === null")
    page.wait()
    assert page.run("return reply.size") == [600, 400]
    width, height = page.run("return [$('stage').clientWidth, $('stage').clientHeight]")
    assert width / height == pytest.approx(1.5, rel=0.01)
    assert page.find(".shape") == []
    page.run("""$("true").checked = true;
        reply.true = [[0, "1", 0.5, 0.25], [0, "1", 0.5, 0.75]];
        reply.answers = [{...reply.answers[0], points: [[1, "1", 0.5, 0.05], [1, "2", 0.5, 0.25]]}];
        draw();""")
    assert rings(page) == [pytest.approx(point) for point in ([50, 10 / 3], [50, 50 / 3])]
    below, above = (float(text.get_attribute("y")) for text in page.find("#marks text"))
    assert below > 100 / 3 and above < 500 / 3     # both numbers are inside the image
    true = page.find("polyline[stroke='#fff']")[0].get_attribute("points")
    assert [float(n) for n in re.split("[ ,]", true)] == pytest.approx([500, 500 / 3, 500, 500])
    page.find("#file")[0].send_keys(str(MEDIA / "bigbuckbunny.mp4"))
    page.wait("reply.times")
    assert page.run("return reply.answers[0].prompt") == "video_point_track_per_frame: any shape"
    assert are_displayed(page, "stage", "answers", "frame", "true") == [True, True, True, False]
    picture = base64.b64encode((MEDIA / "rocket.jpg").read_bytes()).decode()
    assert page.run(DROP, picture, "rocket.jpg", "image/jpeg") == [False, False]
    page.wait("reply.times === null")
    with Image.open(MEDIA / "rocket.jpg") as image:
        assert page.run("return reply.size") == list(image.size)
    page.find("#file")[0].send_keys(str(MEDIA / "bigbuckbunny.mp4"))
    page.wait("reply.times")
    page.run(DROP, "AAAA", "notes.txt", "text/plain")
    page.wait("$('error').textContent")
    assert page.find("#error")[0].text == "notes.txt: Pillow finds no image in this file"
    assert are_displayed(page, "stage", "answers", "frame") == [False] * 3  # nothing old
    page.click("#scene")
    assert page.find("#error")[0].text == ""
    assert len(page.find(".shape")) > 0
    assert are_displayed(page, "frame", "add") == [False, True]
    page.find("#file")[0].send_keys(str(MEDIA / "bigbuckbunny.mp4"))  # the same file again
    page.wait("reply.times")
    assert are_displayed(page, "frame", "add") == [True, False]
    page.run("document.ondrop(new DragEvent('drop', {dataTransfer: new DataTransfer()}))")  # text
    kinds = {kind: page.run("shown.file = {url: `data:${arguments[0]};base64,`}; return isVideo()",
                            kind) for kind in ("image/png", "image/gif", "video/webm")}
    assert kinds == {"image/png": False, "image/gif": True, "video/webm": True}


def test_a_prompt_is_typed_or_chosen_and_one_without_a_style_has_a_hint(page):
    prompt = page.find("#prompt")[0]
    prompt.send_keys("pointing: purple square\ue007")
    page.wait()
    assert rings(page) == [[75, 25]]
    assert verdicts(page) == ["1 of 1 points right"]
    prompt.clear()
    prompt.send_keys("Where is the square?\ue007")
    page.wait("reply.answers[0].prompt.startsWith('Where')")
    assert "trained on prompts that begin with a style" in page.find(".answer i")[0].text
    page.click("#usual button:nth-child(2)")
    assert page.run("return [$('prompt').value, reply.answers.length]") == ["count: any shape", 1]
    page.click("#video")                           # videos have other prompts
    assert prompt.get_attribute("value") == ""
    assert page.run("return reply.answers.length") == 2
    page.click("#scene")
    prompt.send_keys("count: any shape\ue007")
    page.wait()
    page.click("#usual button:last-child")
    assert len(verdicts(page)) == 3
    page.run("show({...reply, answers: [{...reply.answers[0], tokens: [], shares: [[]]}]})")
    assert page.find(".tokens")[0].text == "(an empty answer)"


@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 800)
    for mode in ("scene", "video"):
        page.run(f"setMode('{mode}', 1)")
        page.wait()
        assert page.run("return document.documentElement.scrollWidth") == width
    left, right = page.run("return ['stage', 'form'].map(id => $(id).getBoundingClientRect().left)")
    assert (left < right) == (width > 720)         # two columns
    page.resize(width, 400)
    assert page.run("return $('stage').clientHeight") <= 0.8 * 400  # it fits into the window


def test_a_model_of_another_world_answers_about_files_alone(page, tmp_path):
    save_run(tmp_path)
    ByteTokenizer(("x",)).save(tmp_path)
    page.driver.get(serve("--model", str(tmp_path)))
    assert are_displayed(page, "scene", "video", "stage", "form", "file") == [False] * 4 + [True]
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait()
    prompts = page.run("return reply.answers.map(answer => answer.prompt)")
    assert prompts == ["long_caption:", "pointing: person"]
    assert [note.text for note in page.find(".answer i")] == [
        "Note: the answer is cut at 256 tokens"] * 2     # by an untrained model
    assert page.find("#error")[0].text == ""
    page.run("START.styled = false")               # like a released model
    assert page.run("return usual()[0]") == "Describe it in detail."


@pytest.fixture
def finger(page):
    """finger(element, distance) touches it, moves down by `distance` pixels, and releases it."""
    page.resize(360, 740)
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})

    def touch(element, distance=0):
        x, y = page.run("""arguments[0].scrollIntoView({block: "center"});
            const box = arguments[0].getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];""", element)
        steps = [("touchMove", y + distance * k / 10) for k in range(1, 11)] if distance else []
        for kind, here in [("touchStart", y), *steps, ("touchEnd", None)]:
            points = [] if here is None else [{"x": x, "y": here}]
            page.driver.execute_cdp_cmd("Input.dispatchTouchEvent",
                                        {"type": kind, "touchPoints": points})

    yield touch
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_tap_on_a_token_shows_its_attention_until_the_next_tap(page, finger):
    finger(page.find(".token")[1])
    page.wait("looked && looked[1] === 1")
    assert len(squares(page)) == 50
    finger(page.find(".token")[1])                 # it has the focus already
    page.wait("looked && looked[1] === 1")
    finger(page.find("h1")[0])
    page.wait("!looked")


def test_a_finger_drags_a_shape_and_does_not_scroll(page, finger):
    finger(page.find(".shape")[0], distance=-round(page.run("return $('stage').clientWidth / 5")))
    page.wait()
    assert places(page)[0] == [30, 40]
    assert rings(page)[0] == [30, 40]


def test_all_that_can_have_the_focus_has_a_name_for_screen_readers(page):
    names = {}
    for mode in ("scene", "video"):
        page.run(f"setMode('{mode}', 1)")
        page.wait()
        for node in page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
            can_have = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
            if can_have.get("focusable") and node["role"]["value"] != "RootWebArea":
                names.setdefault(node["name"]["value"].strip(), node["role"]["value"])
    assert "" not in names
    for name in ("Prompt", "Frame", "Colour", "Shape", "Attention in block", "Show the true tracks",
                 "Your own image or video", "New scene", "Delete"):
        assert name in names
    assert any(name.split(" at ")[0].endswith(("circle", "square", "triangle", "cross"))
               for name in names)


def luminance(rgb):
    """The luminance of a colour, as WCAG defines it for the contrast of text."""
    linear = [(c / 255 + 0.055) ** 2.4 / 1.055**2.4 if c > 10 else c / 255 / 12.92 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_in_light_and_dark(page, scheme):
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    in_answer = page.run("""const box = $("answers").firstChild.getBoundingClientRect();
        return [Math.round(box.right) - 9, Math.round(box.top) + 9];""")
    with Image.open(io.BytesIO(page.driver.get_screenshot_as_png())) as image:
        pixels = image.convert("RGB")
    backgrounds = [luminance(pixels.getpixel(tuple(place))) for place in ((2, 2), in_answer)]
    assert [light > 0.5 for light in backgrounds] == [scheme == "light"] * 2
    for name in ("right", "wrong", "note", "token"):
        colour = page.run(f"""const probe = document.body.appendChild(make("b", {{
            className: "{name}" }}));
            const colour = getComputedStyle(probe).color;
            probe.remove();
            return colour;""")
        text = luminance([int(c) for c in re.findall(r"\d+", colour)[:3]])
        for light in backgrounds:
            assert (max(text, light) + 0.05) / (min(text, light) + 0.05) > 4.5, (name, colour)


def test_a_server_that_has_ended_is_a_sentence(page):
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); update()")
    page.wait()
    assert page.find("#error")[0].text.startswith("The server does not answer")
