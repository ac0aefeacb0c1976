"""Milliseconds from a move of a shape to the new points on the page of tools.play, in Chromium.

    python -m tests.tools.play.speed                  # needs Chromium and selenium

Each move is answered by three answers with their attention. The time ends when the page has them.
"""

import statistics

import torch

from tests.tools.play.browser import Window, serve

N_MOVES = 50
MOVE = """selected = 0;
const { x, y } = objects()[0];
move(x < 50 ? x + 1 : 20, y, 1);"""


def measure(window):
    """-> milliseconds of each move, as the page states them."""
    times = []
    for _ in range(N_MOVES):
        window.run(MOVE)
        window.wait()
        assert window.run("return reply.answers.length") == 3
        times.append(int(window.find("#time")[0].text.split()[0]))
    return times


if __name__ == "__main__":
    page = Window()
    page.open(serve())
    measured = measure(page)
    page.driver.quit()
    print(f"median of {N_MOVES}: {statistics.median(measured):.0f} ms "
          f"({min(measured)} to {max(measured)}), {torch.get_num_threads()} threads")
