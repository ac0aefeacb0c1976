"""Measures how long the page of tools.play takes to show new answers after a shape is moved.

    python -m tests.tools.play.speed                  # needs Chromium and selenium

The model gives three answers with their attention after each move. The time ends when the page
receives them.
"""

import statistics

import torch

from tests.tools.play.browser import Window, serve

N_MOVES = 50
MOVE = """selected = 0;
const { x, y } = objects()[0];
move(x < 50 ? x + 1 : 20, y, 1);"""


def measure(window):
    """-> the time of each move in ms, as the page shows it."""
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
