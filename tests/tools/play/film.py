"""Records the page of tools.play while a hand drags a white circle across a scene, and then shows
with the tokens of an answer what the model attended to.

    python -m tests.tools.play.film docs/images/play.gif       # needs Chromium and selenium
"""

import io
import math
import sys

from PIL import Image

from evaluation.pictures import save_gif
from tests.tools.play.browser import Window, serve

SIZE = 860, 510  # of a frame in pixels
N_FRAMES = 56
FRAME_S = 0.1
TOKEN_S = 0.8  # on a token
LEFT, RIGHT, Y = 15, 85, 50  # the path of the circle, in pixels of the scene
SCENE = """document.querySelector("h1").remove();
$("time").style.visibility = "hidden";  // it depends on the machine
$("answers").style.transition = "none";
shown.scene = {slope: [20, -15], texture: 2, period: 8, noise: 8, objects: [
    {colour: "red", shape: "triangle", x: 35, y: 20, r: 14, light: 10},
    {colour: "green", shape: "square", x: 65, y: 80, r: 14, light: 0},
    {colour: "white", shape: "circle", x: 15, y: 50, r: 14, light: 0}]};
drawShapes();
update();
document.body.insertAdjacentHTML("beforeend", `<svg id="hand" width="40" height="40"
    viewBox="0 0 20 20" style="position: fixed; pointer-events: none"><path fill="#fff"
    stroke="#000" d="M5 10V7q0-1 1-1t1 1V6q0-1 1-1t1 1q0-1 1-1t1 1v1q0-1 1-1t1 1v5q0 4-4 4
    -3 0-4-2l-3-5q1-1 2 1z"/></svg>`);"""
# of a token, which may begin with a space at the end of a line
MIDDLE = """const box = [...arguments[0].getClientRects()].at(-1);
return [box.left + box.width / 2, box.top + box.height / 2];"""
HAND = "$('hand').style.cssText += `; left: ${arguments[0] - 18}px; top: ${arguments[1] - 10}px`"


def film(address):
    """Yields the frames as (PIL image, seconds). The circle moves right and back. Then the hand
    moves over the coordinates of the first answer."""
    window = Window()
    window.resize(*SIZE)
    window.open(address)
    window.run(SCENE)
    window.wait()
    left, top, width = window.run(
        "const box = $('stage').getBoundingClientRect(); return [box.left, box.top, box.width]")

    def mouse(kind, x, y, buttons=1):
        window.send("Input.dispatchMouseEvent", {
            "type": kind, "x": round(x), "y": round(y), "button": "left", "buttons": buttons,
            "clickCount": 1})
        window.run(HAND, round(x), round(y))

    def over_circle(x):  # not at its centre, since the ring is there
        return left + (x + 6) * width / 100, top + (Y + 5) * width / 100

    def frame():
        window.wait()
        return Image.open(io.BytesIO(window.driver.get_screenshot_as_png())).convert("RGB")

    mouse("mousePressed", *over_circle(LEFT))
    for k in range(N_FRAMES):
        way = (1 - math.cos(2 * math.pi * k / N_FRAMES)) / 2  # from 0 to 1 and back
        mouse("mouseMoved", *over_circle(LEFT + way * (RIGHT - LEFT)))
        yield frame(), FRAME_S
    mouse("mouseReleased", *over_circle(LEFT), buttons=0)
    window.wait()
    for token in window.find(".answer:first-child .token"):
        word = token.text.strip()
        if word.isdecimal() and len(word) == 3:  # a coordinate
            mouse("mouseMoved", *window.run(MIDDLE, token), buttons=0)
            yield frame(), TOKEN_S
    window.driver.quit()


if __name__ == "__main__":
    images, seconds = zip(*film(serve()), strict=True)
    save_gif(images, sys.argv[1], seconds)
