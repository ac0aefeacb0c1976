"""When a rank dies the others would wait for it: each tells that it lives, and all end, with one sentence, once one does not.

in    the store of the launcher (torchrun), which outlives the ranks
out   nothing, or one sentence and the end of every process

A thread beats once a second and listens to the next rank, so that it works whatever the main thread waits for: an exchange, a GPU, a
slow film. Who is busy goes on beating; who is killed, stopped or crashed does not.
"""

import os
import re
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

PATIENCE = 30                            # seconds without a beat after which a rank is dead


class Pulse(threading.Thread):
    def __init__(self, every=1.0):
        super().__init__(daemon=True, name="pulse")
        self.rank, self.world, self.every = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), every
        self.place = f"pulse/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"          # the store outlives a restart
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                   timeout=timedelta(seconds=PATIENCE))
        self.left = threading.Event()

    def run(self):
        beats, heard, since = 0, None, time.monotonic()
        while not self.left.wait(self.every):
            beats += 1
            try:
                self.store.set(f"{self.place}/{self.rank}", str(beats))
                ended, beat = self.store.check([f"{self.place}/ended"]), self.beat_of((self.rank + 1) % self.world)
            except RuntimeError as e:
                if self.left.is_set():
                    return
                if os.environ["LOCAL_RANK"] == "0":      # nobody can be asked who says it: one on each machine
                    self.say(f"the launcher does not answer any more; all end ({first_sentence(e)})")
                os._exit(1)
            if ended:
                os._exit(1)              # another has said why
            if beat != heard or beat == b"left":
                heard, since = beat, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                self.end(obituary(self.silent(), self.world))

    def beat_of(self, rank):
        key = f"{self.place}/{rank}"
        return self.store.get(key) if self.store.check([key]) else None

    def silent(self, seconds=5):
        """The ranks that do not beat within so many seconds."""
        before = [self.beat_of(r) for r in range(self.world)]
        time.sleep(seconds)
        return [r for r in range(self.world) if r != self.rank and self.beat_of(r) == before[r] != b"left"]

    def end(self, sentence, status=1):
        """Ends this process and, within seconds, all others; of those that find a reason the first says it."""
        try:
            first = self.store.compare_set(f"{self.place}/ended", "", str(self.rank)) == str(self.rank).encode()
        except RuntimeError:
            first = True                 # the launcher is gone as well: nobody to ask
        if first:
            self.say(sentence)
        os._exit(status)                 # leaving the group in good order would wait for who is gone

    def say(self, sentence):
        print(f"\ntrain.py: {sentence}", file=sys.stderr, flush=True)       # the progress bar stands in the line before

    def leave(self):
        """Before the end of a run: that this rank is not heard any more means nothing."""
        self.left.set()
        self.store.set(f"{self.place}/{self.rank}", "left")


def is_of_others(error):
    """Does this RuntimeError tell that another rank does not answer any more?"""
    said = r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|NCCL|gloo"
    return dist.is_initialized() and (isinstance(error, dist.DistError) or bool(re.search(said, str(error))))


def obituary(gone, world, error=None):
    """One sentence about these ranks, and what one of the others met with."""
    who = f"rank {', '.join(map(str, gone))} of {world} has ended or hangs" if gone else "the ranks have lost each other"
    return f"{who}; all end" + (f" ({first_sentence(error)})" if error else "")


def first_sentence(error):
    return re.sub(r"^\[\S+] ", "", str(error).splitlines()[0]).split(". ")[0][:150]          # without the line of gloo's source
