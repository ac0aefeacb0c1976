// Joins the parts of the page: what is pointed at in one of them is shown in all.

// Crops and the windows of patches that visual tokens pool.
class Crops {
  constructor(row, figures, thumb) {
    this.row = row;
    this.grid = row.grid;
    this.patchesPerCrop = row.grid ** 2;
    this.figures = new Map(figures.map(figure => [+figure.dataset.crop, figure]));
    this.thumb = thumb;
    this.lit = [];                               // figures with a highlighted window
    this.windowsOfPatch = new Map();
    this.windowOfToken = new Map();
    row.pool_src.forEach((patches, window) => {
      const used = patches.filter(patch => patch >= 0);
      if (used.length === 0) return;
      this.windowOfToken.set(row.pool_dst[window], window);
      for (const patch of used) {
        const before = this.windowsOfPatch.get(patch) ?? [];
        this.windowsOfPatch.set(patch, [...before, window]);
      }
    });
    for (const [crop, figure] of this.figures) this.drawWindows(crop, figure);
  }
  cropOf(patch) {
    return Math.floor(patch / this.patchesPerCrop);
  }
  square(patch) {                                // an SVG path
    const place = patch % this.patchesPerCrop;
    return `M${place % this.grid} ${Math.floor(place / this.grid)}h1v1h-1z`;
  }
  drawWindows(crop, figure) {                    // lines between them; a shade over unused patches
    const firstWindow = patch => this.windowsOfPatch.get(patch)?.[0];
    let lines = "", unused = "";
    for (let place = 0; place < this.patchesPerCrop; place++) {
      const patch = crop * this.patchesPerCrop + place;
      const x = place % this.grid, y = Math.floor(place / this.grid);
      const window = firstWindow(patch);
      const below = firstWindow(patch + this.grid);
      if (window === undefined) unused += this.square(patch);
      if (x + 1 < this.grid && firstWindow(patch + 1) !== window) lines += `M${x + 1} ${y}v1`;
      if (y + 1 < this.grid && below !== window) lines += `M${x} ${y + 1}h1`;
    }
    figure.querySelector(".lines").setAttribute("d", lines);
    figure.querySelector(".unused").setAttribute("d", unused);
  }
  highlight(windows) {                           // in the crops, and a thumbnail of the first crop
    for (const figure of this.lit) figure.querySelector(".hit").setAttribute("d", "");
    const paths = new Map();
    for (const window of windows) {
      for (const patch of this.row.pool_src[window].filter(patch => patch >= 0)) {
        const crop = this.cropOf(patch);
        paths.set(crop, (paths.get(crop) ?? "") + this.square(patch));
      }
    }
    this.lit = [...paths.keys()].map(crop => this.figures.get(crop));
    for (const [crop, path] of paths) {
      this.figures.get(crop).querySelector(".hit").setAttribute("d", path);
    }
    this.thumb.hidden = this.lit.length === 0;
    if (this.thumb.hidden) return;
    const box = this.lit[0].parentElement;       // many crops scroll within their box
    if (!box.matches(":hover")) box.scrollTo(this.lit[0].offsetLeft, this.lit[0].offsetTop);
    const pen = this.thumb.getContext("2d"), scale = 120 / this.grid;
    pen.drawImage(this.lit[0].querySelector("img"), 0, 0, 120, 120);
    pen.save();
    pen.scale(scale, scale);
    pen.strokeStyle = "#ffd600";
    pen.lineWidth = 4 / scale;
    pen.stroke(new Path2D(paths.values().next().value));
    pen.restore();
  }
  windowsAt(crop, x, y) {                        // shares of the sides -> windows, or undefined
    const index = share => Math.min(Math.max(Math.floor(share * this.grid), 0), this.grid - 1);
    return this.windowsOfPatch.get(crop * this.patchesPerCrop + index(y) * this.grid + index(x));
  }
}

class Page {
  constructor() {
    const byId = id => document.getElementById(id);
    const all = selector => [...document.querySelectorAll(selector)];
    this.row = unpack(JSON.parse(byId("data").textContent));
    this.view = new View(this.row);
    this.ribbon = new Ribbon(byId("ribbon"), this.view);
    this.strip = new Strip(byId("strip"), this.view);
    this.mask = new Mask(byId("mask"), this.view);
    this.crops = new Crops(this.row, all("figure"), byId("thumb"));
    this.texts = all(".run").map(span => {
      return { span, start: +span.dataset.a, stop: +span.dataset.a + +span.dataset.n };
    });
    this.words = byId("words");
    this.held = false;                           // by a click or a key: pointing changes nothing
    byId("about").textContent = `${this.mask.n} x ${this.mask.n} blocks of ${this.row.block} x `
      + `${this.row.block} tokens: queries from top to bottom, keys from left to right. The fuller `
      + "a block's colour, the more of its pairs are allowed. Of a token pointed at, its row is "
      + "amber (what it may attend to), its column green (what may attend to it).";
  }
  layOut() {
    this.view.readColours();
    for (const part of [this.ribbon, this.strip, this.mask]) part.layOut();
    this.draw();
  }
  draw() {
    for (const part of [this.ribbon, this.strip, this.mask]) part.draw();
  }

  // ---- the token pointed at

  // outlined: spans of tokens; note: what they are; windows: if others than the token's own
  select(q, outlined = [], note = "", windows = null) {
    if (q < 0) {
      if (this.view.selection) this.clear();
      return;
    }
    const selection = { q, outlined, ...reach(this.row, q) };
    this.view.selection = selection;
    this.say(describe(this.row, q, selection, note));
    for (const { span, start, stop } of this.texts) {
      // the first token of a run is seen by all that see any of it, the last one sees the most
      const attended = this.view.isAttended(start), attending = this.view.isAttending(stop - 1);
      span.classList.toggle("attends", attended);
      span.classList.toggle("attended-by", attending);
      span.classList.toggle("unrelated", !attended && !attending);
    }
    const own = this.crops.windowOfToken.get(q);
    this.crops.highlight(windows ?? (own === undefined ? [] : [own]));
    this.draw();
  }
  selectBlock(i, j) {
    const [q, qStop] = this.mask.tokensOf(i);
    const [k, kStop] = this.mask.tokensOf(j);
    this.mask.at = [i, j];
    const share = (100 * this.mask.share(i, j)).toFixed(1);
    this.select(qStop - 1, [[k, kStop]],
                `queries ${q} to ${qStop - 1}, keys ${k} to ${kStop - 1}: ${share} % allowed`);
  }
  selectText({ start, stop }) {
    const note = stop - start > 1 ? `tokens ${start} to ${stop - 1}, the last of them` : "";
    this.select(stop - 1, [[start, stop]], note);
  }
  selectWindows(windows) {
    if (!windows) {
      this.clear();
      this.say(["A patch of the overlap: it gives its crop context, and the copy of it in another "
                + "crop is pooled.", ""]);
      return;
    }
    const tokens = windows.map(window => this.row.pool_dst[window]);
    const note = windows.length > 1 ? `${windows.length} tokens pool this window` : "";
    this.select(tokens[0], tokens.map(t => [t, t + 1]), note, windows);
  }
  clear() {
    this.view.selection = null;
    this.hold(false);
    for (const { span } of this.texts) {
      span.classList.remove("attends", "attended-by", "unrelated");
    }
    this.crops.highlight([]);
    this.draw();
  }
  hold(on) {
    this.held = on && this.view.selection !== null;
    document.querySelector("footer").classList.toggle("held", this.held);
  }
  say(lines) {
    lines.forEach((line, i) => this.words.children[i].textContent = line);
  }

  // ---- pointers and keys

  // choose(x, y) of shares of the sides -> [key, act]: act() is called when the key has changed
  onPointer(element, choose) {
    let last = null;
    const go = event => {
      const box = element.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
      const [key, act] = choose(x, y);
      if (key !== last) act();
      last = key;
    };
    element.addEventListener("pointermove", event => { if (!this.held) go(event); });
    element.addEventListener("pointerdown", event => {
      const wasHeld = this.held;
      if (wasHeld) last = null;
      go(event);
      this.hold(!wasHeld && event.pointerType === "mouse");
    });
    element.addEventListener("pointerleave", event => {      // a finger that leaves changes nothing
      last = null;
      if (event.pointerType === "mouse" && !this.held) this.clear();
    });
  }
  onKeys(element, actions) {
    element.addEventListener("keydown", event => {
      if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions[event.key]();
      this.hold(true);
    });
  }
  listen() {
    const { ribbon, strip, mask, crops } = this;
    const choose = (key, act) => [key, act];
    const chooseToken = t => choose(t, () => this.select(t));
    this.onPointer(ribbon.canvas, (x, y) => {
      return chooseToken(ribbon.tokenAt(x * ribbon.canvas.clientWidth, y * ribbon.height));
    });
    this.onPointer(strip.canvas, x => chooseToken(strip.tokenAt(x * strip.width)));
    this.onPointer(mask.canvas, (x, y) => {
      const block = mask.blockAt(x, y);
      return choose(String(block), () => block && this.selectBlock(...block));
    });
    for (const text of this.texts) {
      this.onPointer(text.span, () => choose(text.start, () => this.selectText(text)));
    }
    for (const [crop, figure] of crops.figures) {
      this.onPointer(figure.firstElementChild, (x, y) => {
        const windows = crops.windowsAt(crop, x, y);
        return choose(String(windows), () => this.selectWindows(windows));
      });
    }
    this.listenToKeys();
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.layOut());
    let width = document.body.clientWidth;
    window.addEventListener("resize", () => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      this.layOut();
    });
  }
  listenToKeys() {
    const { T } = this.row;
    const { partStarts } = this.view;
    const within = (value, n) => Math.min(Math.max(value, 0), n - 1);
    const now = () => this.view.selection ? this.view.selection.q : -1;
    const goTo = t => this.select(within(t, T));
    this.onKeys(this.ribbon.canvas, {
      ArrowRight: () => goTo(now() + 1),
      ArrowLeft: () => goTo(now() - 1),
      ArrowDown: () => goTo(now() + this.ribbon.perLine),
      ArrowUp: () => goTo(now() - this.ribbon.perLine),
      Home: () => goTo(0),
      End: () => goTo(T - 1),
      PageDown: () => goTo(partStarts.find(t => t > now()) ?? T - 1),
      PageUp: () => goTo(partStarts.findLast(t => t < now()) ?? 0),
      Enter: () => {
        const text = this.texts.find(({ start, stop }) => now() >= start && now() < stop);
        if (text) {
          text.span.closest("details").open = true;
          text.span.scrollIntoView({ block: "center" });
        }
        goTo(now());
      },
    });
    const move = (di, dj) => () => {
      const [i, j] = this.mask.at ? [this.mask.at[0] + di, this.mask.at[1] + dj] : [0, 0];
      this.selectBlock(within(i, this.mask.n), within(j, this.mask.n));
    };
    this.onKeys(this.mask.canvas, {
      ArrowDown: move(1, 0), ArrowUp: move(-1, 0), ArrowRight: move(0, 1), ArrowLeft: move(0, -1),
    });
    document.addEventListener("keydown", event => { if (event.key === "Escape") this.clear(); });
  }
}

if (typeof document !== "undefined") {           // not in a test that runs the script by itself
  const page = new Page();
  page.layOut();
  page.listen();
}
