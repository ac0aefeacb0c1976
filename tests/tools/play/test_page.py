"""The page of tools.play in a browser: what a person does there, and what it shows."""

import pytest

from tests.evaluation.small_model import MEDIA, save_run
from tests.tools.play.browser import EXTRAS, Window, serve
from text.tokenizer import ByteTokenizer
from vision import image_windows

pytestmark = EXTRAS
SCENE = """shown.scene = {slope: [10, -20], texture: 1, period: 6, noise: 3, objects: [
    {colour: "white", shape: "circle", x: 30, y: 60, r: 18, light: 0},
    {colour: "purple", shape: "square", x: 75, y: 25, r: 16, light: 0}]}; drawShapes(); update();"""
# drops a file with these bytes on the page
DROP = """const files = new DataTransfer();
files.items.add(new File([arguments[0]], arguments[1], {type: arguments[2]}));
document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true}));"""


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
    assert page.run("return [most, n]") == [1, 2]  # the first change, and the last
    assert rings(page)[0] == [50, 70]


def test_keys_move_and_delete_a_shape(page):
    keys = {"right": "\ue014", "down": "\ue015", "delete": "\ue017"}
    page.resize(1180, 400)                         # lower than the page: keys must not scroll it
    page.run("document.querySelector('.shape').focus({preventScroll: true})")
    page.actions().send_keys(keys["right"] * 2, keys["down"]).perform()
    page.wait()
    assert places(page)[0] == [40, 65]
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


def test_shapes_are_added_and_deleted_and_the_background_changes(page):
    page.run("$('colour').value = 'red'; $('shape').value = 'triangle'")
    page.click("#add")
    added = page.run("return objects()[2]")
    assert [added["colour"], added["shape"]] == ["red", "triangle"]
    assert page.run("return reply.answers[1].tokens.join('')") == "3"
    page.click("#delete")                          # the selected one, which is the new one
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
    while left:                                    # none is selected: the last one goes
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
    percent = page.run("return Math.round(shares().reduce((a, b) => a + b) / 1e4)")
    sentence = f"gave {percent} % of its attention to the picture (block: mean of all)"
    assert sentence in page.find("#looked")[0].text
    page.run("$('block').selectedIndex = 2; $('block').onchange()")
    assert [square[4] for square in squares(page)] != mean
    assert "(block: 2)" in page.find("#looked")[0].text
    page.actions().move_to_element(page.find("h1")[0]).perform()
    assert squares(page) == []
    page.run("arguments[0].focus()", token)        # as by the Tab key
    assert len(squares(page)) == 50


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
    width, height = 1000 / (columns * 19 + 8), 1000 / (rows * 19 + 8)  # of a patch of the mosaic
    # 65 patches in windows of 2: the last window hangs over
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
    page.run("looked = [reply.answers[0], 0]; draw()")
    # 10 patches in 4 windows of 3, which begin a patch outside
    assert len(squares(page)) == 4 * 4
    assert squares(page)[0][:4] == pytest.approx([-100, -100, 300, 300])
    lines = "return [...$('marks').querySelectorAll('polyline')].map(l => l.getAttribute('stroke'))"
    assert "#fff" not in page.run(lines)
    page.find("#true")[0].click()
    n_true = page.run("return new Set(reply.true.map(point => point[1])).size")
    assert page.run(lines).count("#fff") == n_true > 0


def test_files_are_chosen_or_dropped_and_what_is_no_image_is_a_sentence(page):
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait("mode === 'file' && reply.scene === null")
    page.wait()
    assert page.run("return reply.size") == [600, 400]
    width, height = page.run("return [$('stage').clientWidth, $('stage').clientHeight]")
    assert width / height == pytest.approx(1.5, rel=0.01)
    assert page.find(".shape") == []
    page.run(DROP, "not an image", "notes.txt", "text/plain")
    page.wait("$('error').textContent")
    assert page.find("#error")[0].text.endswith("notes.txt: Pillow finds no image in it")
    page.find("#file")[0].send_keys(str(MEDIA / "bigbuckbunny.mp4"))
    page.wait("reply.times")
    assert page.find("#error")[0].text == ""
    assert page.find("#frame")[0].is_displayed()
    page.click("#scene")
    assert len(page.find(".shape")) > 0
    page.run("document.ondrop(new DragEvent('drop', {dataTransfer: new DataTransfer()}))")  # a text


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
    page.click("#usual button:last-child")
    assert len(verdicts(page)) == 3


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 800)
    for mode in ("scene", "video"):
        page.run(f"setMode('{mode}', 1)")
        page.wait()
        assert page.run("return document.documentElement.scrollWidth") == width
    left, right = page.run("return ['stage', 'form'].map(id => $(id).getBoundingClientRect().left)")
    assert (left < right) == (width > 720)         # in two columns


def test_a_model_of_another_world_answers_about_files_alone(page, tmp_path):
    save_run(tmp_path)
    ByteTokenizer(("x",)).save(tmp_path)
    page.driver.get(serve("--model", str(tmp_path)))
    assert [page.find(f"#{name}")[0].is_displayed() for name in ("scene", "video")] == [False] * 2
    assert [page.find(f"#{name}")[0].is_displayed() for name in ("stage", "form")] == [False] * 2
    page.find("#file")[0].send_keys(str(MEDIA / "coffee.png"))
    page.wait()
    prompts = page.run("return reply.answers.map(answer => answer.prompt)")
    assert prompts == ["long_caption:", "pointing: person"]
    assert page.find(".answer i") and not page.find(".answer i")[0].text  # no hint, no verdict
    assert page.find("#error")[0].text == ""


def test_nothing_but_answers_is_fetched(page):
    names = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert {name for name in names if not name.startswith("data:")} == {page.driver.current_url}


def test_a_server_that_has_ended_is_a_sentence(page):
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); update()")
    page.wait()
    assert page.find("#error")[0].text.startswith("The server does not answer")
