// SPDX-License-Identifier: Apache-2.0
// The live page: asks the server a few times a second what there is, draws what has changed.
// Names come from a stream, whose writer may be anybody: they become text alone, never HTML.
import {Chart, drawDevices} from "./chart.js";
import {ask, byId, element, fill, keepFresh} from "./common.js";
import {showControl} from "./controls.js";

const PERIOD = 500;  // milliseconds between two looks
const cards = new Map();  // by the leaf's number
let chosen = null;  // numbers of the leaves that are shown; null before the user chooses
let last = null;  // the last state
let refresh = () => {};

// -- plots ----------------------------------------------------------------------------------------
class Card {
  constructor(leaf) {
    this.leaf = leaf;
    this.root = element("section", "", "card");
    this.root.append(element("h2", leaf.label));
    this.whole = element("button", "whole", "whole");
    this.whole.type = "button";
    this.whole.hidden = true;
    this.whole.addEventListener("click", () => this.zoom(null));
    const canvas = document.createElement("canvas"), note = element("div", "", "note");
    this.root.append(this.whole, canvas, note);
    this.chart = new Chart(canvas, note, (from, to) => this.zoom([from, to]));
    canvas.addEventListener("dblclick", () => this.zoom(null));
    this.drawn = "";
    this.part = null;
  }

  zoom(part) {
    const overOther = /^\d+$/.test(byId("x").value);
    if (part && (overOther || !["curves", "lanes"].includes(this.kind()))) return;
    this.part = part;
    this.whole.hidden = !part;
    refresh();
  }

  // What is shown of it: not every leaf has all of it.
  kind() {
    const show = byId("show").value;
    return this.leaf.shows.includes(show) ? show : this.leaf.shows[0];
  }

  async update(settings) {
    const kind = this.kind();
    const key = JSON.stringify([this.leaf.version, kind, settings, this.part, this.root.clientWidth]);
    if (key === this.drawn || this.busy) return;
    this.busy = true;
    try {
      const query = {id: this.leaf.id, show: kind, x: settings.x, window: settings.window};
      if (this.part) [query.from, query.to] = this.part;
      const answer = await ask("leaf", query);
      await this.draw(kind, answer, settings);
      this.drawn = key;
    } finally {
      this.busy = false;
    }
  }

  async draw(kind, answer, settings) {
    const {logX, logY, weight} = settings;
    if (kind === "latest") {
      if (answer.image) return this.chart.image(answer.image);
      if (answer.text !== undefined) return this.chart.words(answer.text);
      const x = answer.values.map((_, index) => index);
      const values = [{name: "", x, mean: answer.values}];
      return this.chart.curves(values, {title: "element", logX, logY, weight: 0});
    }
    if (kind === "histograms") {
      const axis = settings.x === "seconds" ? "seconds" : "record";
      return this.chart.histograms(answer.runs.flatMap((run) => run.held), {axis, logX, logY});
    }
    const runs = new Set(answer.series.map((one) => one.source)).size > 1;
    const devices = new Set(answer.series.map((one) => one.device)).size > 1;
    for (const one of answer.series) {
      const parts = [runs && one.run, devices && `device ${one.device}`];
      parts.push(one.lane !== null && `lane ${one.lane}`);
      one.name = parts.filter((part) => part !== false).join(", ") || this.leaf.label;
    }
    return this.chart.curves(answer.series, {title: answer.x, logX, logY, weight, left: answer.left_out});
  }
}

function updateCards(state, settings) {
  const part = byId("filter").value.toLowerCase();
  const wanted = state.leaves.filter((leaf, index) =>
    (chosen ? chosen.has(leaf.id) : index < state.plots) && leaf.label.toLowerCase().includes(part));
  byId("nothing").hidden = wanted.length > 0;
  const kept = new Set(wanted.map((leaf) => leaf.id));
  for (const [id, card] of cards) {
    if (kept.has(id)) continue;
    card.root.remove();
    cards.delete(id);
  }
  const plots = byId("plots");
  wanted.forEach((leaf, index) => {
    if (!cards.has(leaf.id)) cards.set(leaf.id, new Card(leaf));
    const card = cards.get(leaf.id);
    card.leaf = leaf;
    if (plots.children[index] !== card.root) plots.insertBefore(card.root, plots.children[index] || null);
  });
  return Promise.all(wanted.map((leaf) => {
    const card = cards.get(leaf.id), box = card.root.getBoundingClientRect();
    const seen = box.bottom > -200 && box.top < window.innerHeight + 200;
    return seen ? card.update(settings) : null;
  }));
}

// -- tables ---------------------------------------------------------------------------------------
function updateTables(state) {
  const names = Object.keys(state.columns).filter((name) => state.leaves.some((leaf) => leaf[name]));
  const on = (leaf, index) => (chosen ? chosen.has(leaf.id) : index < state.plots);
  fill(byId("leaves"), ["", ...names.map((name) => state.columns[name])], state.leaves.map((leaf, index) => [
    {key: `${leaf.id}:${on(leaf, index)}`, make: () => choice(leaf, on(leaf, index))},
    ...names.map((name) => leaf[name]),
  ]));
  drawDevices(byId("devices"), state.devices);
  updateCounts("alerts", state.alerts);
  updateCounts("checks", state.checks);
  updateCounts("channels", state.channels);
  updateCounts("gates", state.gates);
}

// A table of objects with the same names; none where there is nothing.
function updateCounts(id, rows) {
  const there = Boolean(rows && rows.length);
  byId(`${id}-part`).hidden = !there;
  if (!there) return;
  const titles = Object.keys(rows[0]);
  fill(byId(id), titles.map((title) => title.replaceAll("_", " ")), rows.map((row) => titles.map((title) => row[title])));
}

function choice(leaf, on) {
  const box = element("input");
  box.type = "checkbox";
  box.checked = on;
  box.title = "show its plot";
  box.addEventListener("change", () => {
    if (!chosen) chosen = new Set(last.leaves.slice(0, last.plots).map((one) => one.id));
    if (box.checked) chosen.add(leaf.id); else chosen.delete(leaf.id);
    refresh();
  });
  return box;
}

function updateHead(state) {
  const {records, missing, sessions, per_second, latest_ns} = state.totals;
  const parts = state.streams.map((stream) => element("b", stream));
  parts.push(element("span", `${records.toLocaleString("en")} records, ${per_second.toFixed(1)} a second`));
  if (missing) parts.push(element("span", `${missing.toLocaleString("en")} numbers missing (dropped, or not sent)`));
  if (sessions > 1) parts.push(element("span", `${sessions} sessions`));
  if (records) parts.push(element("span", `latest ${new Date(latest_ns / 1e6).toLocaleString()}`));
  byId("head").replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
}

function updateAxes(state) {
  const select = byId("x"), known = new Set([...select.options].map((option) => option.value));
  for (const leaf of state.leaves) {
    if (known.size < 200 && !leaf.array && !known.has(String(leaf.id))) {
      select.append(new Option(leaf.label, String(leaf.id)));
    }
  }
}

// -- the loop -------------------------------------------------------------------------------------
async function work() {
  const state = last = await ask("state");
  updateHead(state);
  updateAxes(state);
  showControl(state.control);
  updateTables(state);
  const settings = {
    x: byId("x").value, window: byId("window").value, weight: Number(byId("smooth").value),
    logX: byId("logx").checked, logY: byId("logy").checked, theme: document.documentElement.dataset.theme,
  };
  await updateCards(state, settings);
  document.body.dataset.records = state.totals.records;  // of what has been drawn
}

byId("x").addEventListener("change", () => cards.forEach((card) => { card.part = null; card.whole.hidden = true; }));
refresh = keepFresh(work, PERIOD);
