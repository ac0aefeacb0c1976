"""Starts tools.play, and opens its page in headless Chromium: for tests, film.py and speed.py."""

import contextlib
import queue
import shutil
import threading
import time
from unittest import mock

from tools.play import __main__ as play

PROGRAMS = [shutil.which(name) for name in ("chromium", "chromedriver")]
ARE_MISSING = None in PROGRAMS
HOW_TO_INSTALL = "Chromium is not installed: apt-get install chromium chromium-driver"


def serve(*flags):
    """Starts tools.play in a thread that ends with this process -> the address of the page."""
    opened = queue.SimpleQueue()
    play.time_limit = contextlib.nullcontext  # it needs the main thread
    with mock.patch.object(play.webbrowser, "open", opened.put):
        threading.Thread(target=play.main, args=[["--port", "0", *flags]], daemon=True).start()
        return opened.get(timeout=120)


class Window:
    """A browser window that shows the page."""

    def __init__(self):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = PROGRAMS[0]
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(PROGRAMS[1]))
        self.run = self.driver.execute_script
        self.send = self.driver.execute_cdp_cmd
        self.find = lambda selector: self.driver.find_elements("css selector", selector)
        self.actions = lambda: webdriver.ActionChains(self.driver, duration=20)

    def resize(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def open(self, address):
        self.driver.get(address)
        self.wait()

    def wait(self, condition="reply && !running && since === null"):
        """Waits for a condition in JavaScript; by default, until all answers are shown."""
        end = time.monotonic() + 120
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def click(self, selector):
        self.find(selector)[0].click()
        self.wait()
