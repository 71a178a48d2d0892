// SPDX-License-Identifier: Apache-2.0
// Knobs and the stop button, where the program offers them.

const STEPS = 1000;  // of a slider
const byId = (id) => document.getElementById(id);
const knobs = new Map();  // by name

async function send(path, value) {
  const answer = await fetch(`api/${path}`, {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(value),
  });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

// A knob's field, with a slider where it has a range.
class KnobField {
  constructor(knob) {
    this.knob = knob;
    this.root = document.createElement("div");
    this.root.className = "knob";
    const name = document.createElement("label");
    name.className = "name";
    name.textContent = knob.name;
    this.field = document.createElement("input");
    this.field.type = knob.dtype === "bool" ? "checkbox" : "text";
    this.field.inputMode = "decimal";
    this.field.addEventListener("change", () => this.set(this.typed()));
    name.append(" ", this.field);
    this.root.append(name);
    if (knob.range) this.root.append(this.makeSlider());
    this.refused = document.createElement("div");
    this.refused.className = "refused";
    this.root.append(this.refused);
  }

  makeSlider() {
    const line = document.createElement("div");
    line.className = "range";
    this.slider = document.createElement("input");
    this.slider.type = "range";
    this.slider.min = 0;
    this.slider.max = STEPS;
    this.slider.addEventListener("input", () => { this.field.value = String(this.slid()); });
    this.slider.addEventListener("change", () => this.set(this.slid()));
    line.append(`${this.knob.range[0]} `, this.slider, ` ${this.knob.range[1]}`);
    return line;
  }

  slid() {
    const [low, high] = this.knob.range, part = Number(this.slider.value) / STEPS;
    if (part === 0) return low;
    if (part === 1) return high;
    const value = this.knob.scale === "log" ? low * (high / low) ** part : low + part * (high - low);
    return /int/.test(this.knob.dtype) ? Math.round(value) : Number(value.toPrecision(4));
  }

  // What was typed: a number, or text that the program refuses in its own words.
  typed() {
    if (this.field.type === "checkbox") return this.field.checked;
    const text = this.field.value.trim(), number = Number(text);
    const exact = Number.isFinite(number) && (!Number.isInteger(number) || Number.isSafeInteger(number));
    return text !== "" && exact ? number : text;
  }

  // One after the other: the last that was chosen is to hold.
  set(value) {
    this.sent = (this.sent || Promise.resolve()).then(async () => {
      try {
        await send("knobs", {[this.knob.name]: value});
        this.refused.textContent = "";
        this.put(value);
      } catch (error) {
        this.refused.textContent = error.message;
      }
    });
  }

  show(knob) {
    this.knob = knob;
    if (this.held === knob.value || this.root.contains(document.activeElement)) return;
    this.put(knob.value);
  }

  put(value) {
    this.held = value;
    if (this.field.type === "checkbox") this.field.checked = value;
    this.field.value = String(value);
    if (!this.slider) return;
    const [low, high] = this.knob.range;
    const part = this.knob.scale === "log" ? Math.log(value / low) / Math.log(high / low)
      : (value - low) / (high - low);
    this.slider.value = Math.round(part * STEPS);
  }
}

let stopping = null;  // while a second click stops

function makeStop() {
  const button = byId("stop");
  button.dataset.made = "yes";
  button.addEventListener("click", async () => {
    if (!stopping) {
      button.className = "sure";
      button.textContent = "Really stop";
      stopping = setTimeout(calm, 4000);
      return;
    }
    calm();
    try {
      await send("stop", {reason: "stopped on the live page"});
    } catch (error) {
      byId("said").textContent = error.message;
    }
  });
}

function calm() {
  clearTimeout(stopping);
  stopping = null;
  byId("stop").className = "";
  byId("stop").textContent = "Stop";
}

// control: {knobs, stop_reason}; null where the program offers none.
export function showControl(control) {
  byId("control").hidden = !control;
  if (!control) return;
  if (!byId("stop").dataset.made) makeStop();
  byId("said").textContent = control.stop_reason === null ? "" : `asked to stop: ${control.stop_reason}`;
  const there = new Map(control.knobs.map((knob) => [knob.name, knob]));
  for (const [name, field] of knobs) {
    const knob = there.get(name);
    if (knob && knob.dtype === field.knob.dtype && JSON.stringify(knob.range) === JSON.stringify(field.knob.range)) continue;
    field.root.remove();
    knobs.delete(name);
  }
  for (const knob of control.knobs) {
    if (!knobs.has(knob.name)) {
      const field = new KnobField(knob);
      knobs.set(knob.name, field);
      byId("knobs").append(field.root);
    }
    knobs.get(knob.name).show(knob);
  }
}
