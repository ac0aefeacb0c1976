"""Records the page of tools.play while a hand drags a white circle across a scene.

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
LEFT, RIGHT, Y = 15, 85, 50  # the path of the circle, in pixels of the scene
SCENE = """document.querySelector("h1").remove();
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
HAND = "$('hand').style.cssText += `; left: ${arguments[0] - 18}px; top: ${arguments[1] - 10}px`"


def film(address):
    """Yields the frames as PIL images. The circle moves right and back, so that they loop."""
    window = Window()
    window.resize(*SIZE)
    window.open(address)
    window.run(SCENE)
    window.wait()
    left, top, width = window.run(
        "const box = $('stage').getBoundingClientRect(); return [box.left, box.top, box.width]")

    def mouse(kind, x):
        # not at the centre, since the ring is there
        place = {"x": round(left + (x + 6) * width / 100), "y": round(top + (Y + 5) * width / 100)}
        window.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {
            "type": kind, **place, "button": "left", "buttons": 1, "clickCount": 1})
        window.run(HAND, place["x"], place["y"])

    mouse("mousePressed", LEFT)
    for k in range(N_FRAMES):
        way = (1 - math.cos(2 * math.pi * k / N_FRAMES)) / 2  # from 0 to 1 and back
        mouse("mouseMoved", LEFT + way * (RIGHT - LEFT))
        window.wait()
        yield Image.open(io.BytesIO(window.driver.get_screenshot_as_png())).convert("RGB")
    window.driver.quit()


if __name__ == "__main__":
    save_gif(list(film(serve())), sys.argv[1], [FRAME_S] * N_FRAMES)
