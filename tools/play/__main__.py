"""Opens a web page on which you drag shapes and see where the model points.

    python -m tools.play
"""

import errno
import json
import signal
import sys
import webbrowser
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import torch

from records.errors import Unreadable, UserError, explained
from tools.command import make_parser, positive, report_errors
from tools.model_flags import add_model, open_model, sampling
from tools.play.answers import reply_to
from toy.shapes import KINDS
from toy.world import WORDS

N_PORTS = 20  # that are tried
MAX_BODY = 100_000_000  # bytes of a request


class TooSlow(BaseException):
    """A request takes too long. The code that decodes an image catches every Exception."""


class Handler(BaseHTTPRequestHandler):
    """Replies to GET with the page, and to POST with the results that the main thread computes."""

    def handle(self):
        with suppress(ConnectionError):  # the page was closed
            super().handle()

    def do_GET(self):
        if self.is_own():
            self.reply(self.server.page, "text/html")

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 10 and int(length) <= MAX_BODY):
            self.send_error(413, f"state the length of the request, at most {MAX_BODY} bytes")
        elif self.is_own():
            answer = SimpleQueue()
            self.server.requests.put((self.rfile.read(int(length)), answer))
            self.reply(answer.get(), "application/json")

    def is_own(self):
        """Does the request come from our page, and not from another host name or origin?"""
        host = self.headers.get("Host", "")
        is_own = (host.partition(":")[0] in ("127.0.0.1", "localhost")
                  and self.headers.get("Origin") in (None, f"http://{host}"))
        if not is_own:
            self.send_error(403, "only the page of this server may use it")
        return is_own

    def reply(self, text, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def time_limit(seconds):
    """Ends the block with TooSlow after this time. It works only in the main thread."""
    def stop(*_):
        raise TooSlow(f"the answer takes longer than {seconds} s; give a shorter prompt or a "
                        "smaller file, or start this command with a larger --seconds")

    signal.signal(signal.SIGALRM, stop)
    # again after each further second, since Python ignores an exception in a finalizer
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def open_server(port):
    """-> a server at this port or, if it is in use, at the next free one of N_PORTS."""
    for number in range(port, port + N_PORTS):
        with explained(f"--port {number}"):
            try:
                server = ThreadingHTTPServer(("127.0.0.1", number), Handler)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            if number != port:
                print(f"--port {port} is in use, so this is port {number}:", end=" ")
            return server
    raise UserError(f"--port {port}: it is in use, as are the {N_PORTS - 1} ports after it")


@report_errors
def main(argv=None):
    parser = make_parser("play", __doc__)
    add_model(parser, model="toy")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (default 8000)")
    parser.add_argument("--seconds", type=positive, default=60, metavar="N",
                        help="maximum time of a request, since others wait for it (default 60)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    args = parser.parse_args(argv)
    args.sampling = sampling(args)
    # leave one core to the browser, because each operation waits for the slowest thread
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    loaded = open_model(args)
    model, tokenizer, config = loaded
    start = {"toy": getattr(tokenizer, "words", None) == WORDS, "kinds": KINDS._asdict(),
             "styled": config.prefix_all, "grid": model.config.vision.grid,
             "margin": model.config.vision.overlap_margin}
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    server = open_server(args.port)
    server.page = page.replace("{{START}}", json.dumps(start))
    server.requests = SimpleQueue()
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    while True:  # the model runs in the main thread, where Ctrl-C stops it at once
        try:
            # a signal that comes just before the wait is handled after it
            body, answer = server.requests.get(timeout=1)
        except Empty:
            continue
        try:
            with time_limit(args.seconds):
                reply = reply_to(json.loads(body), loaded, args.sampling)
        except (TooSlow, Unreadable, UserError) as error:
            reply = {"error": str(error)}
        except Exception as error:  # the server continues with the next request
            reply = {"error": f"This request cannot be used: {error!r:.300}"}
        answer.put(json.dumps(reply))


if __name__ == "__main__":
    # not killed at once, so that the file of a request is deleted
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
