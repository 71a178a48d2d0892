// SPDX-License-Identifier: Apache-2.0
// The table of runs: its columns, in which order its rows are, and which of them a filter leaves.
import {shown} from "./chart.js";
import {element} from "./common.js";

// A column: its group and title, and the value that a run has there.
function columnsOf(runs, all) {
  const keys = (name) => [...new Set(runs.flatMap((run) => Object.keys(run[name])))];
  const config = keys("config").filter((key) => all || runs.length < 2 || differs(runs, key));
  const made = (group, name, names) =>
    names.map((title) => ({group, title, of: (run) => run[name][title]}));
  return [
    {group: "", title: "state", of: (run) => run.state},
    {group: "", title: "began", of: (run) => run.started_ms},
    {group: "", title: "time", of: (run) => run.seconds},
    {group: "", title: "tags", of: (run) => run.tags.join(", ")},
    {group: "", title: "alerts", of: (run) => run.alert_count},
    ...made("summary", "summary", keys("summary")),
    ...made("last value", "last", keys("last")),
    ...made("config", "config", config),
  ].filter((column) => column.title === "state" || runs.some((run) => ![undefined, "", 0].includes(column.of(run))));
}

export function differs(runs, key) {
  return new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1;
}

export function asText(value) {
  if (value === undefined) return "";
  if (value === null) return "–";
  return typeof value === "number" ? shown(value) : String(value);
}

function lasted(seconds) {
  if (seconds === null) return "";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

// -- filter ---------------------------------------------------------------------------------------
// "adam rate<0.01 state=crashed": a run is left if all words hold. A word without a sign is a part
// of the name, a tag, the notes or a value of its config.
export function matches(run, text) {
  return text.trim().split(/\s+/).filter(Boolean).every((word) => {
    const found = word.match(/^([^<>=!]+)(<=|>=|!=|==|<|>|=)(.*)$/);
    return found ? compares(run, found[1], found[2], found[3]) : contains(run, word.toLowerCase());
  });
}

function contains(run, word) {
  const texts = [run.name, run.id, run.state, run.notes, ...run.tags];
  for (const [key, value] of Object.entries(run.config)) texts.push(`${key}=${asText(value)}`);
  return texts.some((text) => text.toLowerCase().includes(word));
}

function compares(run, key, sign, text) {
  if (sign === "==") return compares(run, key, "=", text);
  const own = {name: run.name, state: run.state, notes: run.notes, time: run.seconds, alerts: run.alert_count};
  const held = {...run.last, ...run.summary, ...run.config, ...own};
  if (key === "tag") {
    const has = run.tags.includes(text);
    return sign === "!=" ? !has : has;
  }
  const names = Object.keys(held).filter((name) => name === key || name.endsWith(`.${key}`));
  if (!names.length) return sign === "!=";
  // A name as it is written comes before names that end so: "loss" before "eval.loss".
  const value = held[names.includes(key) ? key : names[0]], number = Number(text);
  if (typeof value === "number" && text !== "" && !Number.isNaN(number)) {
    return {"<": value < number, ">": value > number, "<=": value <= number, ">=": value >= number,
            "=": value === number, "!=": value !== number}[sign];
  }
  const same = asText(value).toLowerCase() === text.toLowerCase();
  if (sign === "=" || sign === "!=") return same === (sign === "=");
  return false;
}

// -- order ----------------------------------------------------------------------------------------
export function sorted(runs, order) {
  if (!order) return runs;
  const of = order.of, sign = order.down ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (isNone(x) || isNone(y)) return isNone(x) - isNone(y);  // these come last either way
    if (typeof x === "number" && typeof y === "number") return sign * (x - y);
    return sign * String(x).localeCompare(String(y), undefined, {numeric: true});
  });
}

function isNone(value) {
  return value === undefined || value === null || value === "";
}

// -- the cells of `fill` --------------------------------------------------------------------------
// `known` are all runs; `on` has the chosen ones, `color(id)` their colours; `told` what a click does.
export function tableOf(runs, {known, all, order, on, color, told}) {
  const columns = columnsOf(runs, all);
  const mark = (column) => (order && order.title === column.title && order.group === column.group ? (order.down ? " ▾" : " ▴") : "");
  const head = (column) => ({
    key: `${column.group}:${column.title}${mark(column)}`,
    make: () => {
      const button = element("button", "");
      button.type = "button";
      button.append(element("span", column.group, "group"), element("span", column.title + mark(column)));
      button.addEventListener("click", () => told.sort(column));
      return button;
    },
  });
  const name = {group: "", title: "run", of: (run) => run.name};
  const called = (run) => (known.some((one) => one !== run && one.name === run.name) ? run.id : run.name);
  const rows = runs.map((run) => [
    {key: `${run.id}:${called(run)}:${on.has(run.id)}:${color(run.id)}`, make: () => nameOf(run, called(run), {on, color, told})},
    ...columns.map((column) => cellOf(run, column)),
  ]);
  return [[head(name), ...columns.map(head)], rows];
}

function cellOf(run, column) {
  const value = column.of(run);
  if (column.group === "" && column.title === "state") {
    return {key: `${run.state}:${run.error}`, make: () => {
      const cell = element("span", run.state, `state ${["running", "crashed", "unreadable"].find((one) => one === run.state) || ""}`);
      cell.title = run.error;
      return cell;
    }};
  }
  if (column.group === "" && column.title === "began") return value ? new Date(value).toLocaleString() : "";
  if (column.group === "" && column.title === "time") return lasted(value);
  if (column.group === "" && column.title === "alerts") return value || "";
  return asText(value);
}

function nameOf(run, name, {on, color, told}) {
  const root = element("span", "", "run"), box = element("input");
  box.type = "checkbox";
  box.checked = on.has(run.id);
  box.title = "lay it over the others";
  box.addEventListener("change", () => told.choose(run.id, box.checked));
  const swatch = document.createElement("canvas");  // a style of an element is not the page's to set
  swatch.className = "swatch";
  swatch.width = swatch.height = 8;
  const pen = swatch.getContext("2d");
  pen.fillStyle = on.has(run.id) ? color(run.id) : "rgba(0, 0, 0, 0)";
  pen.fillRect(0, 0, 8, 8);
  const label = element("button", name);
  label.type = "button";
  label.title = run.notes || run.id;
  label.addEventListener("click", () => told.open(run.id));
  root.append(box, swatch, label);
  return root;
}
