"""Pages of real rows, and a parser of what they show, for the tests of tools.view."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np

import attention
import packing
from text.tokenizer import ByteTokenizer
from tools.view import __main__ as command
from tools.view.page import page
from tools.view.row_data import PackedRow, batch_of
from toy import world
from training.config import parse

ROOT = Path(__file__).parents[3]
MEDIA = ROOT / "tests" / "media"
PHOTOS = ("--data", str(MEDIA / "records.jsonl"), "--media", str(MEDIA))
TOY = ("--stage", "1", "--tiny")
ROWS = [TOY, (*TOY, "--data.max_tokens=331"), (*TOY, *PHOTOS),
        ("--stage", "2", *PHOTOS, "--data.max_tokens=2600", "--pack_crops=12"),
        ("--stage", "2", "--tiny")]              # the last: videos


class Shown(NamedTuple):
    page: str
    batch: packing.Batch
    packed: PackedRow

    @property
    def facts(self):                             # the JSON of the page
        return facts_of(self.page)


def show(examples, records, tokenizer, config):
    packed = PackedRow(examples, records, tokenizer, config)
    batch = batch_of(packed)
    return Shown(page(packed, batch), batch, packed)


@cache
def shown_row(*flags, number=0):
    """The row of that number of a plan, from train.py's flags."""
    packed = command.planned_row(*parse(flags), number)
    return show(*packed)


def byte_tokenizer(config):
    return ByteTokenizer(world.WORDS, config.model.n_vocab)


def facts_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def expand(runs):
    return np.repeat(runs[::2], runs[1::2])


def allowed_by_attention(batch):
    """(T,T) bool of a Batch of one row."""
    return attention.allow(batch.visible_until, batch.bidir)[0].numpy()


def annotations_of(example):
    """(T,) of a data.Example: 0 in its trunk, k in its k-th branch."""
    T = len(example.tokens)
    numbers = np.zeros(T, int)
    if example.n_branches > 1:
        ends = np.unique(example.visible_until)      # of the branches; the last also ends the trunk
        first = int((example.visible_until < T).argmax())
        numbers[first:] = np.searchsorted(ends, np.arange(first, T), "right") + 1
    return numbers


def pairs_per_block(allowed, size):
    """(T,T) bool -> (n,n), how many pairs are allowed in each block of size x size."""
    T = len(allowed)
    n = -(-T // size)
    padded = np.zeros((n * size, n * size), bool)
    padded[:T, :T] = allowed
    return padded.reshape(n, size, n, size).sum((1, 3))


class PageReader(HTMLParser):
    """What a page shows: parts of the trees and their runs of text, figures with circles, and which
    elements with which attributes there are."""

    def __init__(self, page):
        super().__init__()
        self.nodes = []                          # [[title, [attributes and text of a run, ..]], ..]
        self.figures = []
        self.tags = set()
        self.open = []                           # [(tag, attributes), ..]
        self.feed(page)

    @property
    def runs(self):
        return [run for _, runs in self.nodes for run in runs]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        classes = attributes.get("class", "").split()
        self.tags.add((tag, *sorted(attributes)))
        if "node" in classes:
            self.nodes.append(["", []])
        if "run" in classes:
            self.nodes[-1][1].append({**attributes, "text": "", "printed": ""})
        if tag == "figure":
            self.figures.append({**attributes, "circles": []})
        if tag == "circle":
            self.figures[-1]["circles"].append(attributes)
        if tag == "img":
            self.figures[-1]["src"] = attributes["src"]
        if tag not in ("meta", "img", "path"):   # these have no end
            self.open.append((tag, attributes))

    def handle_startendtag(self, tag, attrs):
        self.tags.add((tag, *sorted(dict(attrs))))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag = self.open[-1][0] if self.open else ""
        in_run = any("run" in a.get("class", "").split() for _, a in self.open)
        if in_run and tag == "sup":
            self.nodes[-1][1][-1]["printed"] += data
        elif in_run and tag != "i":              # <i>: names of tokens that decode to nothing
            self.nodes[-1][1][-1]["text"] += data
        elif tag == "b" and self.nodes and not self.nodes[-1][1]:
            self.nodes[-1][0] += data
