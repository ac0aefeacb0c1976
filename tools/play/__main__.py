"""Opens a page on which one drags shapes and sees where the model points.

    python -m tools.play

It also reads images and videos of yours, and shows what each token of an answer attended to.
"""

import json
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from evaluation.generate import Sampling, evaluation_config
from tools.command import add_model, make_parser, report_errors, whole_number
from tools.play.answers import reply_to
from toy.shapes import FEW
from toy.world import WORDS
from weights.files import explained, open_model_folder

MAX_BODY = 100_000_000  # bytes of a request


class Handler(BaseHTTPRequestHandler):
    """Replies to GET with the page, and to POST with what the main thread computes."""

    def do_GET(self):
        if self.is_own():
            self.send(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.send(413, json.dumps({"error": f"a request has at most {MAX_BODY} bytes"}))
        elif self.is_own():
            answer = SimpleQueue()
            self.server.requests.put((self.rfile.read(int(length)), answer))
            self.send(*answer.get())

    def is_own(self):
        """Does it come from our page, at this address and not at a name that leads to it?"""
        host = self.headers.get("Host", "")
        is_own = (host.partition(":")[0] in ("127.0.0.1", "localhost")
                  and self.headers.get("Origin") in (None, f"http://{host}"))
        if not is_own:
            self.send(403, json.dumps({"error": "only the page of this server may use it"}))
        return is_own

    def send(self, status, text, kind="application/json"):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def answer_requests(requests, loaded, sampling):
    """Runs the model for ever: in the main thread, where Ctrl-C ends it at once."""
    while True:
        body, answer = requests.get()
        try:
            with explained("this request"):
                answer.put((200, json.dumps(reply_to(json.loads(body), loaded, sampling))))
        except (ValueError, OSError) as error:
            answer.put((200, json.dumps({"error": str(error)})))


@report_errors
def main(argv=None):
    parser = make_parser("play", __doc__)
    add_model(parser, model="toy")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, help=(
        "of the address 127.0.0.1 (default 8000); 0: any free port"))
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    args = parser.parse_args(argv)
    sampling = Sampling(args.temperature, args.top_p, args.frequency_penalty, args.seed)
    dtype = getattr(torch, args.dtype)
    model, tokenizer, config = open_model_folder(args.model, args.device, dtype)
    start = {"toy": getattr(tokenizer, "words", None) == WORDS, "kinds": FEW._asdict(),
             "grid": config.vision.grid, "margin": config.vision.overlap_margin}
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    with explained(f"--port {args.port}"):
        server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.page = page.replace("{{START}}", json.dumps(start))
    server.requests = SimpleQueue()
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    answer_requests(server.requests, (model, tokenizer, evaluation_config(config)), sampling)


if __name__ == "__main__":
    main()
