"use strict";

// The row as tools/view/row_data.py writes it, and the mask rule. No drawing.

function expandRuns(runs) {                      // [5, 3, 0, 1] -> [5, 5, 5, 0]
  const values = [];
  for (let i = 0; i < runs.length; i += 2) {
    for (let n = runs[i + 1]; n > 0; n--) values.push(runs[i]);
  }
  return values;
}

function expandDifferences(runs) {               // runs of differences -> values
  let sum = 0;
  return expandRuns(runs).map(difference => sum += difference);
}

function unpack(page) {
  const { T, ids, pieces, patch, grid, block } = page;
  const row = { T, ids, pieces, patch, grid, block };
  const fields = ["tokens", "targets", "weights", "example", "annotation", "visible_until",
                  "bidir", "counts"];
  for (const name of fields) row[name] = expandRuns(page[name]);
  row.pos = expandDifferences(page.pos);
  const columns = page.pool_src.map(expandDifferences);
  row.pool_src = columns[0].map((_, m) => columns.map(column => column[m]));
  row.pool_dst = expandDifferences(page.pool_dst);
  return row;
}

// The mask rule, as attention.allow has it; a test compares the two on every pair.
function allow(row, q, k) {
  const causal = k <= q && q < row.visible_until[k];
  const bothWays = row.bidir[q] === row.bidir[k] && row.bidir[q] !== 0;
  return causal || bothWays;
}

// attends[k]: may token q attend to k?  attendedBy[k]: may k attend to q?  1 or 0.
function reach(row, q) {
  const attends = new Uint8Array(row.T);
  const attendedBy = new Uint8Array(row.T);
  for (let k = 0; k < row.T; k++) {
    attends[k] = allow(row, q, k);
    attendedBy[k] = allow(row, k, q);
  }
  return { attends, attendedBy };
}

function isPadding(row, t) {                     // padding has the number after the last example
  return row.example[t] === row.ids.length;
}

// ---- words about a token

function quoted(row, id) {
  return "“" + (row.pieces[id] ?? id).replace(/\n/g, "\\n") + "”";
}

function sum(flags) {
  return flags.reduce((a, b) => a + b, 0);
}

// Two lines about token q. note: what was pointed at, if it was more than the token.
function describe(row, q, { attends, attendedBy }, note) {
  let shared = 0, own = 0, later = 0;
  for (let k = 0; k < row.T; k++) {
    if (!attends[k]) continue;
    if (row.annotation[k]) own++;
    else shared++;
    if (k > q) later++;
  }
  if (isPadding(row, q)) {
    return [`token ${q} · padding`,
            note || `Attends to the ${shared} tokens of padding up to itself, so that no row of `
              + "the mask is empty."];
  }
  const annotation = row.annotation[q];
  const part = annotation ? `annotation ${annotation}` : "shared part";
  const first = `token ${q} · example ${row.example[q]} ${row.ids[row.example[q]]} · ${part} · `
    + `position ${row.pos[q]} · ${quoted(row, row.tokens[q])}`;

  const weight = row.weights[q];
  const loss = weight > 0
    ? `has to predict ${quoted(row, row.targets[q])}, weight ${+weight.toPrecision(4)}` : "no loss";
  let parts = `${shared} of the shared part`;
  if (own) parts += ` and ${own} of its annotation`;
  if (later) parts += `, ${later} of them later than itself`;
  const second = [loss, `may attend to ${shared + own} of ${row.T} tokens: ${parts}`,
                  `${sum(attendedBy)} may attend to it`,
                  `visible until token ${row.visible_until[q]}, where its `
                    + `${annotation ? "annotation" : "example"} ends`];
  if (row.bidir[q]) {
    second.push(`it and all visual tokens with bidir ${row.bidir[q]} see each other both ways`);
  }
  if (note) second.unshift(note);
  return [first, second.join(" · ")];
}
