// The row as a ribbon and as a strip, and the mask: what is always there is drawn once (layOut),
// what concerns the token pointed at is drawn over a copy of it (draw).

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// What all canvases need: the row, its colours, its runs of tokens, and what is selected.
class View {
  constructor(row) {
    this.row = row;
    // q: the token pointed at; attends, attendedBy: from reach; outlined: [[start, stop], ..]
    this.selection = null;
    this.heaviest = row.weights.reduce((a, b) => Math.max(a, b), 0) || 1;
    this.colourNames = row.tokens.map((_, t) => this.colourName(t));
    const sameExample = (a, b) => row.example[a] === row.example[b];
    const samePart = (a, b) => sameExample(a, b) && row.annotation[a] === row.annotation[b];
    this.exampleStarts = this.startsOf(sameExample);
    this.partStarts = this.startsOf(samePart);
    this.colourStarts = this.startsOf((a, b) => this.colourNames[a] === this.colourNames[b]);
    this.isAttended = t => this.selection.attends[t] === 1;
    this.isAttending = t => this.selection.attendedBy[t] === 1;
    this.isUnrelated = t => !this.isAttended(t) && !this.isAttending(t);
  }
  colourName(t) {                                // of the style sheet, or a share of --learned
    const row = this.row;
    if (isPadding(row, t)) return "--padding";
    if (row.bidir[t] > 0) return row.tokens[t] === row.patch ? "--visual" : "--visual-edge";
    if (row.weights[t] === 0) return "--prompt";
    return (.35 + .65 * row.weights[t] / this.heaviest).toFixed(2);
  }
  readColours() {                                // again when the page turns light or dark
    this.palette = {};
    for (const name of ["ink", "soft", "paper", "card", "learned", "position", "block", "attends",
                        "attended-by"]) {
      this.palette[name] = css("--" + name);
    }
    const known = new Map();
    for (const name of new Set(this.colourNames)) {
      const share = `rgb(${this.palette.learned} / ${name})`;
      known.set(name, name.startsWith("--") ? css(name) : share);
    }
    this.colours = this.colourNames.map(name => known.get(name));
  }
  startsOf(same) {                               // first tokens of runs; same(t - 1, t): in one run
    const starts = [];
    for (let t = 0; t < this.row.T; t++) if (t === 0 || !same(t - 1, t)) starts.push(t);
    return starts;
  }
  forEachRun(test, visit) {                      // visit(start, stop) of tokens that pass the test
    for (let start = 0; start < this.row.T;) {
      let stop = start;
      while (stop < this.row.T && test(stop) === test(start)) stop++;
      if (test(start)) visit(start, stop);
      start = stop;
    }
  }
}

function prepare(canvas, width, height) {        // sharp on dense screens -> a pen
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const pen = canvas.getContext("2d");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  pen.scale(scale, scale);
  return pen;
}

function snapshot(canvas) {
  const copy = document.createElement("canvas");
  copy.width = canvas.width;
  copy.height = canvas.height;
  copy.getContext("2d").drawImage(canvas, 0, 0);
  return copy;
}

function restore(canvas, copy) {
  const pen = canvas.getContext("2d");
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(copy, 0, 0);
  pen.restore();
  return pen;
}

// Lines of cells, one for each token; above them hills of positions, below them underlines.
class Ribbon {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.T = view.row.T;
    this.highestPosition = view.row.pos.reduce((a, b) => Math.max(a, b), 1);
  }
  chooseCells(width) {                           // the largest that need at most 1400 pixels
    for (const cell of [14, 10, 8, 6, 4, 3, 2]) {
      this.cell = cell;
      this.wide = cell >= 6;
      this.perLine = Math.max(Math.floor(width / cell), 1);
      this.labelHeight = this.wide ? 13 : 0;
      this.hillHeight = this.wide ? 14 : 6;
      this.cellHeight = this.wide ? 16 : cell + 4;
      this.gap = this.wide ? 8 : 6;
      this.cellTop = this.labelHeight + this.hillHeight;
      this.lineHeight = this.cellTop + this.cellHeight + this.gap;
      this.height = Math.ceil(this.T / this.perLine) * this.lineHeight;
      if (this.height <= 1400) return;
    }
  }
  layOut() {
    const width = this.canvas.parentElement.clientWidth;
    this.chooseCells(width);
    this.canvas.style.height = this.height + "px";
    const pen = prepare(this.canvas, width, this.height);
    pen.font = "10px system-ui, sans-serif";
    this.drawHills(pen);
    this.drawCells(pen);
    this.drawStarts(pen);
    this.background = snapshot(this.canvas);
  }
  place(t) {                                     // -> x of the token, y of its line
    return [t % this.perLine * this.cell, Math.floor(t / this.perLine) * this.lineHeight];
  }
  tokenAt(x, y) {                                // -1: none
    const column = Math.floor(x / this.cell);
    const t = Math.floor(y / this.lineHeight) * this.perLine + column;
    return column >= 0 && column < this.perLine && t >= 0 && t < this.T ? t : -1;
  }
  forEachLine(start, stop, visit) {              // tokens start to stop, cut where lines end
    for (let from = start; from < stop;) {
      const to = Math.min(stop, from - from % this.perLine + this.perLine);
      visit(from, to, ...this.place(from));
      from = to;
    }
  }
  drawHills(pen) {
    pen.fillStyle = this.view.palette.position;
    this.forEachLine(0, this.T, (from, to, x, y) => {
      const floor = y + this.cellTop;
      pen.beginPath();
      pen.moveTo(x, floor);
      for (let t = from; t < to; t++) {
        const height = (this.hillHeight - 2) * this.view.row.pos[t] / this.highestPosition;
        const left = x + (t - from) * this.cell;
        pen.lineTo(left, floor - 1 - height);
        pen.lineTo(left + this.cell, floor - 1 - height);
      }
      pen.lineTo(x + (to - from) * this.cell, floor);
      pen.fill();
    });
  }
  drawCells(pen) {
    const { row, colours, colourStarts, palette } = this.view;
    const drawRun = (from, to, x, y) => {
      const top = y + this.cellTop;
      pen.fillStyle = colours[from];
      if (!this.wide) pen.fillRect(x, top, (to - from) * this.cell, this.cellHeight);
      for (let t = from; t < to; t++) {
        const left = x + (t - from) * this.cell;
        if (this.wide) pen.fillRect(left, top, this.cell - 1, this.cellHeight);
        if (row.bidir[t] > 0 && row.weights[t] > 0) {        // a visual token that predicts
          pen.fillStyle = `rgb(${palette.learned})`;
          pen.fillRect(left, top + this.cellHeight - 4, this.cell - 1, 4);
          pen.fillStyle = colours[from];
        }
      }
    };
    colourStarts.forEach((t, i) => this.forEachLine(t, colourStarts[i + 1] ?? this.T, drawRun));
  }
  drawStarts(pen) {                              // bars and labels of examples and annotations
    const { row, palette, partStarts } = this.view;
    const examples = new Set(this.view.exampleStarts);
    partStarts.forEach((t, i) => {
      const [x, y] = this.place(t);
      const isExample = examples.has(t);
      const left = x - (isExample ? 1 : .5);
      const width = isExample ? 2 : Math.max(1, this.cell / 4);
      const height = this.hillHeight + this.cellHeight + (isExample ? 2 : 0);
      pen.fillStyle = isExample ? palette.ink : `rgb(${palette.paper})`;
      pen.fillRect(left, y + this.labelHeight, width, height);
      if (!this.wide) return;
      let label = `annotation ${row.annotation[t]}`;
      if (isExample) label = isPadding(row, t) ? "padding" : `example ${row.example[t]}`;
      const stop = partStarts[i + 1] ?? this.T;
      const room = Math.min(stop - t, this.perLine - t % this.perLine) * this.cell;
      pen.fillStyle = isExample ? palette.ink : palette.soft;
      if (pen.measureText(label).width < room) pen.fillText(label, x + 1, y + 10);
    });
  }
  draw() {
    const pen = restore(this.canvas, this.background);
    const { selection, palette } = this.view;
    if (!selection) return;
    const fill = (test, style, top, height) => {
      pen.fillStyle = style;
      this.view.forEachRun(test, (start, stop) => {
        this.forEachLine(start, stop, (from, to, x, y) => {
          pen.fillRect(x, y + top, (to - from) * this.cell, height);
        });
      });
    };
    const below = this.cellTop + this.cellHeight;
    const bar = this.wide ? 2.5 : 2;
    const height = this.hillHeight + this.cellHeight + 2;
    fill(this.view.isUnrelated, `rgb(${palette.paper} / .8)`, this.labelHeight, height);
    fill(this.view.isAttended, palette.attends, below + .5, bar);
    fill(this.view.isAttending, palette["attended-by"], below + 1 + bar, bar);
    selection.outlined.forEach(([start, stop]) => this.outline(pen, start, stop, palette.soft));
    this.outline(pen, selection.q, selection.q + 1, palette.ink);
  }
  outline(pen, start, stop, style) {
    const margin = this.wide ? 0 : 1.5;
    pen.strokeStyle = style;
    pen.lineWidth = 2;
    this.forEachLine(start, stop, (from, to, x, y) => {
      const width = Math.max((to - from) * this.cell - 1, 1);
      pen.strokeRect(x - margin, y + this.cellTop - margin, width + 2 * margin,
                     this.cellHeight + 2 * margin);
    });
  }
}

// The whole row in one line, at the bottom of the window.
class Strip {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.T = view.row.T;
  }
  layOut() {
    const { colours, colourStarts, exampleStarts, palette } = this.view;
    this.width = this.canvas.clientWidth;
    const pen = prepare(this.canvas, this.width, 12);
    colourStarts.forEach((t, i) => {
      pen.fillStyle = colours[t];
      this.fill(pen, t, colourStarts[i + 1] ?? this.T, 3, 9);
    });
    pen.fillStyle = palette.ink;
    for (const t of exampleStarts) pen.fillRect(this.x(t), 3, 1, 9);
    this.background = snapshot(this.canvas);
  }
  x(t) {
    return t * this.width / this.T;
  }
  fill(pen, start, stop, top, height) {
    pen.fillRect(this.x(start), top, this.x(stop) - this.x(start), height);
  }
  tokenAt(x) {
    return Math.min(Math.max(Math.floor(x * this.T / this.width), 0), this.T - 1);
  }
  draw() {
    const pen = restore(this.canvas, this.background);
    const { selection, palette } = this.view;
    if (!selection) return;
    const fill = (test, style, top, height) => {
      pen.fillStyle = style;
      this.view.forEachRun(test, (start, stop) => this.fill(pen, start, stop, top, height));
    };
    pen.globalAlpha = .84;
    fill(this.view.isUnrelated, palette.card, 3, 9);
    pen.globalAlpha = 1;
    fill(this.view.isAttended, palette.attends, 0, 1.5);
    fill(this.view.isAttending, palette["attended-by"], 1.5, 1.5);
    pen.fillStyle = palette.ink;
    pen.fillRect(this.x(selection.q) - 1, 0, 3, 12);
  }
}

// A pixel for each block, its shade the share of allowed pairs; along two sides colours of tokens.
class Mask {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.block = view.row.block;
    this.n = Math.ceil(view.row.T / this.block);
    this.edge = Math.max(Math.round(this.n / 50), 1);
  }
  tokensOf(i) {                                  // of a row of blocks; the last may be shorter
    return [i * this.block, Math.min((i + 1) * this.block, this.view.row.T)];
  }
  share(i, j) {
    const [q, qStop] = this.tokensOf(i);
    const [k, kStop] = this.tokensOf(j);
    return this.view.row.counts[i * this.n + j] / ((qStop - q) * (kStop - k));
  }
  layOut() {
    this.canvas.width = this.canvas.height = this.n + this.edge;
    const pen = this.canvas.getContext("2d");
    for (let i = 0; i < this.n; i++) {
      pen.fillStyle = this.view.colours[i * this.block];
      pen.fillRect(this.edge + i, 0, 1, this.edge);
      pen.fillRect(0, this.edge + i, this.edge, 1);
      for (let j = 0; j < this.n; j++) {
        if (this.share(i, j) === 0) continue;
        pen.fillStyle = `rgb(${this.view.palette.block} / ${this.share(i, j)})`;
        pen.fillRect(this.edge + j, this.edge + i, 1, 1);
      }
    }
    this.background = snapshot(this.canvas);
  }
  blockAt(x, y) {                                // shares of the sides -> [i, j], or null
    const place = share => Math.floor(share * (this.n + this.edge)) - this.edge;
    const [i, j] = [place(y), place(x)];
    return i >= 0 && j >= 0 && i < this.n && j < this.n ? [i, j] : null;
  }
  draw() {
    const pen = restore(this.canvas, this.background);
    const { selection, palette } = this.view;
    if (!selection) return;
    const at = this.edge + Math.floor(selection.q / this.block);
    pen.globalAlpha = .55;
    pen.fillStyle = palette.attends;
    pen.fillRect(this.edge, at, this.n, 1);
    pen.fillStyle = palette["attended-by"];
    pen.fillRect(at, this.edge, 1, this.n);
    pen.globalAlpha = 1;
  }
}
