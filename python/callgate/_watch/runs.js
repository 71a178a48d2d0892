// SPDX-License-Identifier: Apache-2.0
// The page of runs: a table, curves of the chosen runs over each other, what differs in their
// configs, their images and texts, and all alerts.
import {Chart, COLORS, shown} from "./chart.js";
import {ask, byId, element, fill, keepFresh} from "./common.js";
import {asText, differs, matches, sorted, tableOf} from "./runs_table.js";

const PERIOD = 1000;  // milliseconds between two looks
const MOST_CHOSEN = 8, MOST_MEDIA = 16, MOST_ALERTS = 50;
const plots = new Map(), media = new Map();  // cards, by their names
const colors = new Map();  // by run
let chosen = new Set();  // ids of runs; the newest until the user chooses
let chosenByUser = false;
let order = null;
let opened = null;  // the run of which details are shown
let refresh = () => {};

function color(id) {
  if (!colors.has(id)) colors.set(id, COLORS[colors.size % COLORS.length]);
  return colors.get(id);
}

const told = {
  sort(column) {
    const again = order && order.title === column.title && order.group === column.group;
    order = again && order.down ? null : {...column, down: Boolean(again)};
    refresh();
  },
  choose(id, on) {
    chosenByUser = true;
    if (on) chosen.add(id); else chosen.delete(id);
    refresh();
  },
  open(id) {
    opened = opened === id ? null : id;
    byId("about-part").open = true;
    refresh();
  },
};

// -- plots ----------------------------------------------------------------------------------------
class Plot {
  constructor(leaf) {
    this.leaf = leaf;
    this.root = element("section", "", "card");
    this.whole = element("button", "whole", "whole");
    this.whole.type = "button";
    this.whole.hidden = true;
    this.whole.addEventListener("click", () => this.zoom(null));
    const canvas = document.createElement("canvas"), note = element("div", "", "note");
    this.root.append(element("h2", leaf), this.whole, canvas, note);
    this.chart = new Chart(canvas, note, (from, to) => this.zoom([from, to]));
    canvas.addEventListener("dblclick", () => this.zoom(null));
    this.drawn = "";
    this.part = null;
  }

  zoom(part) {
    if (part && !["record", "seconds"].includes(byId("x").value)) return;
    this.part = part;
    this.whole.hidden = !part;
    refresh();
  }

  async update(runs, settings) {
    const key = JSON.stringify([runs.map((run) => [run.id, run.version]), settings, this.part, this.root.clientWidth]);
    if (key === this.drawn) return;
    const query = [["leaf", this.leaf], ["x", settings.x], ...runs.map((run) => ["run", run.id])];
    if (this.part) query.push(["from", this.part[0]], ["to", this.part[1]]);
    const answer = await ask("curves", query);
    for (const one of answer.series) {
      one.color = color(one.run);
      const devices = answer.series.filter((other) => other.run === one.run).length > 1;
      one.name = devices ? `${one.run}, device ${one.device}` : one.run;
    }
    const {logX, logY, weight} = settings;
    this.chart.curves(answer.series, {title: answer.x, logX, logY, weight, left: answer.left_out});
    this.drawn = key;
  }
}

// Makes the cards that are wanted, in their order, and takes the others away.
function keepCards(cards, root, names, make) {
  const kept = new Set(names);
  for (const [name, card] of cards) {
    if (kept.has(name)) continue;
    card.root.remove();
    cards.delete(name);
  }
  names.forEach((name, index) => {
    if (!cards.has(name)) cards.set(name, make(name));
    const card = cards.get(name);
    if (root.children[index] !== card.root) root.insertBefore(card.root, root.children[index] || null);
  });
}

function isSeen(card) {
  const box = card.root.getBoundingClientRect();
  return box.bottom > -200 && box.top < window.innerHeight + 200;
}

async function updatePlots(runs, most) {
  const part = byId("find").value.toLowerCase();
  const leaves = [...new Set(runs.flatMap((run) => Object.keys(run.last)))];
  const wanted = leaves.filter((leaf) => leaf.toLowerCase().includes(part)).slice(0, most);
  keepCards(plots, byId("plots"), wanted, (leaf) => new Plot(leaf));
  const settings = {
    x: byId("x").value, weight: Number(byId("smooth").value), logX: byId("logx").checked,
    logY: byId("logy").checked, theme: document.documentElement.dataset.theme,
  };
  const select = byId("x"), known = new Set([...select.options].map((option) => option.value));
  for (const leaf of leaves) if (known.size < 200 && !known.has(leaf)) select.append(new Option(leaf, leaf));
  await Promise.all(wanted.map((leaf) => plots.get(leaf)).filter(isSeen).map((card) => {
    const own = runs.filter((run) => card.leaf in run.last);
    return card.update(own, settings);
  }));
}

// -- images and texts -----------------------------------------------------------------------------
class Medium {
  constructor(run, leaf) {
    this.run = run;
    this.leaf = leaf;
    this.root = element("section", "", "card medium");
    this.shown = element("div");
    this.place = element("div", "", "note");
    this.slider = element("input");
    this.slider.type = "range";
    this.slider.min = 0;
    this.slider.addEventListener("input", () => {
      this.at = Number(this.slider.value) === Number(this.slider.max) ? -1 : Number(this.slider.value);
      this.drawn = "";
      refresh();
    });
    this.root.append(element("h2", `${leaf} · ${run}`), this.shown, this.slider, this.place);
    this.at = -1;  // the last one, whatever comes
    this.drawn = "";
  }

  async update(version) {
    const at = this.at;
    if (this.drawn === `${version}:${at}`) return;
    const answer = await ask("media", {run: this.run, leaf: this.leaf, at});
    if (at !== this.at) return;  // the slider was moved meanwhile: the next look asks for its place
    this.drawn = `${version}:${at}`;
    this.slider.max = answer.places.length - 1;
    this.slider.value = answer.at;
    this.slider.hidden = answer.places.length < 2;
    const place = answer.places[answer.at];
    this.place.textContent = `record ${place.record}, ${shown(Number(place.seconds.toFixed(3)))} s`;
    this.shown.replaceChildren(answer.image ? await pictureOf(answer.image) : element("pre", answer.text));
  }
}

async function pictureOf(image) {
  const picture = new Image(), canvas = document.createElement("canvas");
  picture.src = `data:image/png;base64,${image.png}`;
  await picture.decode();
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas;
}

async function updateMedia(runs) {
  const part = byId("find").value.toLowerCase();
  const wanted = runs.flatMap((run) => run.media.map((leaf) => [leaf, run]))
    .filter(([leaf]) => leaf.toLowerCase().includes(part))
    .sort((a, b) => a[0].localeCompare(b[0])).slice(0, MOST_MEDIA);
  const names = new Map(wanted.map(([leaf, run]) => [JSON.stringify([leaf, run.id]), [leaf, run]]));
  keepCards(media, byId("media"), [...names.keys()], (name) => {
    const [leaf, run] = names.get(name);
    return new Medium(run.id, leaf);
  });
  await Promise.all([...names].map(([name, [, run]]) => {
    const card = media.get(name);
    return isSeen(card) ? card.update(run.version) : null;
  }));
}

// -- tables ---------------------------------------------------------------------------------------
function updateDifferences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((key) => differs(runs, key));
  byId("differences-part").hidden = runs.length < 2 || !keys.length;
  fill(byId("differences"), ["", ...runs.map((run) => run.id)],
       keys.map((key) => [key, ...runs.map((run) => asText(run.config[key]))]));
}

function updateAlerts(runs) {
  const rows = runs.flatMap((run) => [
    ...run.alerts.map((one) => ({...one, run: run.id})),
    ...run.checks.map((one) => ({...one, run: run.id, text: `check failed: ${one.text}`})),
  ]).sort((a, b) => b.time_ms - a.time_ms).slice(0, MOST_ALERTS);
  byId("alerts-part").hidden = !rows.length;
  fill(byId("alerts"), ["when", "run", "alert"], rows.map((one) => [
    new Date(one.time_ms).toLocaleTimeString(), one.run,
    one.left_out ? `${one.text} (${one.left_out} more like it before)` : one.text,
  ]));
}

async function updateAbout(runs) {
  const run = runs.find((one) => one.id === opened), part = byId("about-part");
  part.hidden = !run;
  if (!run) return;
  const key = JSON.stringify([run.id, run.state, run.error, run.knobs, run.summary]);
  if (part.dataset.held === key) return;
  part.dataset.held = key;
  const more = await ask("run", {run: run.id});
  const parts = [element("b", `${run.name}, ${run.state}`), element("div", more.folder)];
  if (run.error) parts.push(element("div", run.error, "lost"));
  if (run.notes) parts.push(element("pre", run.notes));
  if (more.traceback) parts.push(element("pre", more.traceback));
  for (const [title, held] of [["config", run.config], ["summary", run.summary], ["knobs", run.knobs]]) {
    const lines = Object.entries(held).map(([name, value]) => `${name} = ${asText(value)}`);
    if (lines.length) parts.push(element("pre", `${title}\n${lines.join("\n")}`));
  }
  byId("about").replaceChildren(...parts);
}

function updateHead(state, left) {
  const running = state.runs.filter((run) => run.state === "running").length;
  const crashed = state.runs.filter((run) => run.state === "crashed").length;
  const parts = [element("b", state.folders.join(", "))];
  if (left < state.runs.length) parts.push(element("span", `${left} left by the filter`));
  if (running) parts.push(element("span", `${running} running`));
  if (crashed) parts.push(element("span", `${crashed} crashed`, "lost"));
  byId("head").replaceChildren(...parts.flatMap((one, index) => (index ? [" · ", one] : [one])));
}

// -- the loop -------------------------------------------------------------------------------------
async function work() {
  const state = await ask("runs");
  const runs = sorted(state.runs.filter((run) => matches(run, byId("filter").value)), order);
  if (!chosenByUser) chosen = new Set(state.runs.slice(0, MOST_CHOSEN).map((run) => run.id));
  for (const run of [...state.runs].reverse()) if (chosen.has(run.id)) color(run.id);
  const laid = runs.filter((run) => chosen.has(run.id));
  updateHead(state, runs.length);
  fill(byId("runs"), ...tableOf(runs, {known: state.runs, all: byId("all").checked, order, on: chosen, color, told}));
  updateAlerts(runs);
  updateDifferences(laid);
  await updateAbout(runs);
  await updatePlots(laid, state.plots);
  await updateMedia(laid);
  byId("nothing").hidden = state.runs.length > 0;
  document.body.dataset.records = state.runs.reduce((sum, run) => sum + run.records, 0);  // that were drawn
  document.body.dataset.runs = runs.length;
}

byId("x").addEventListener("change", () => plots.forEach((card) => { card.part = null; card.whole.hidden = true; }));
refresh = keepFresh(work, PERIOD);
