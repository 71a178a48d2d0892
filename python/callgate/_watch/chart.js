// SPDX-License-Identifier: Apache-2.0
// Draws one plot into a canvas: curves with bands, histograms over time, values, a picture.

export const COLORS = ["#3b76d6", "#e07b28", "#2f9e56", "#d0404c", "#8a62c4", "#8d6a4f", "#d070b0",
                "#7a8493", "#a2a32a", "#2aa6b8"];
const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 30;

export function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "NaN";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return Number(value.toPrecision(4)).toString();
}

// As TensorBoard's: a mean of what came before, with weights that fall by `weight` a point, and
// without the bias to its beginning. Begins anew behind a gap.
export function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) {
      sum = total = 0;
      return null;
    }
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// What maps values between two ends to pixels, and the values to write at the axis.
function scale(low, high, from, to, log) {
  if (log && high > 0) {
    const a = Math.log10(low), b = Math.log10(high), width = b - a || 1;
    return {
      low, high, log,
      at: (value) => (value > 0 ? from + (Math.log10(value) - a) / width * (to - from) : NaN),
      value: (pixel) => 10 ** (a + (pixel - from) / (to - from) * width),
      ticks: logTicks(a, b),
    };
  }
  const width = high - low || 1;
  return {
    low, high, log: false,
    at: (value) => from + (value - low) / width * (to - from),
    value: (pixel) => low + (pixel - from) / (to - from) * width,
    ticks: linearTicks(low, high),
  };
}

function linearTicks(low, high) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high && ticks.length < 12; ++i) ticks.push(i * step);
  return ticks;
}

function logTicks(a, b) {
  const ticks = [], step = Math.max(1, Math.ceil((b - a) / 5));
  for (let power = Math.ceil(a); power <= b; power += step) ticks.push(10 ** power);
  return ticks.length >= 2 ? ticks : linearTicks(10 ** a, 10 ** b).filter((value) => value > 0);
}

// The least and greatest of some values; with `log` of those above 0. A little room between equals.
function ends(lists, log) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  return [low, high];
}

export class Chart {
  // `zoomed(from, to)` is told of a part of the x axis that was dragged over.
  constructor(canvas, note, zoomed) {
    this.canvas = canvas;
    this.note = note;
    this.plain = "";
    this.dragged = null;
    canvas.addEventListener("pointerdown", (event) => {
      this.dragged = [event.offsetX, event.offsetX];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => { this.note.textContent = this.plain; });
    canvas.addEventListener("pointercancel", () => { this.dragged = null; });
    canvas.addEventListener("pointerup", () => {
      const dragged = this.dragged;
      this.dragged = null;
      if (dragged && this.x && Math.abs(dragged[1] - dragged[0]) > 8) {
        const [from, to] = dragged.map((pixel) => this.x.value(pixel)).sort((a, b) => a - b);
        zoomed(from, to);
      } else if (this.again) {
        this.again();
      }
    });
  }

  point(pixel) {
    if (this.dragged) {
      this.dragged[1] = pixel;
      this.again();
      this.pen.fillStyle = "rgba(120, 150, 220, 0.25)";
      this.pen.fillRect(this.dragged[0], TOP, pixel - this.dragged[0], this.height - TOP - BOTTOM);
    }
    if (this.tell) this.note.textContent = this.tell(pixel);
  }

  begin() {
    const style = getComputedStyle(this.canvas), ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.text = style.getPropertyValue("--quiet");
    this.line = style.getPropertyValue("--line");
    this.tell = this.x = null;
  }

  axes(xs, ys, logX, logY, title) {
    const pen = this.pen, bottom = this.height - BOTTOM;
    this.x = scale(...ends(xs, logX), LEFT, this.width - RIGHT, logX);
    this.y = scale(...ends(ys, logY), bottom, TOP, logY);
    pen.strokeStyle = this.line;
    pen.fillStyle = this.text;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of this.y.ticks) {
      const y = this.y.at(tick);
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(this.width - RIGHT, y);
      pen.stroke();
      pen.fillText(shown(tick), LEFT - 5, y + 4);
    }
    pen.textAlign = "center";
    for (const tick of this.x.ticks) pen.fillText(shown(tick), this.x.at(tick), bottom + 14);
    pen.textAlign = "right";
    pen.fillText(title, this.width - RIGHT, this.height - 3);
  }

  clipped(draw) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(LEFT, TOP, this.width - LEFT - RIGHT, this.height - TOP - BOTTOM);
    this.pen.clip();
    draw(this.pen);
    this.pen.restore();
  }

  // series: [{name, x, mean, low, high}], lists of one length; a null begins a gap.
  curves(series, {title, logX, logY, weight, left}) {
    this.again = () => this.curves(series, {title, logX, logY, weight, left});
    this.begin();
    series.forEach((one, index) => { one.color ||= COLORS[index % COLORS.length]; });
    const lines = series.map((one) => (weight > 0 ? smoothed(one.mean, weight) : one.mean));
    const heights = series.flatMap((one) => [one.mean, one.low || [], one.high || []]);
    this.axes(series.map((one) => one.x), heights, logX, logY, title);
    this.clipped(() => series.forEach((one, index) => {
      if (one.low) this.band(one, one.color);
      if (weight > 0) this.path(one.x, one.mean, one.color, 0.25);
      this.path(one.x, lines[index], one.color, 1);
    }));
    this.plain = this.note.textContent = left ? `${left} curves more are left out` : "";
    this.legend(series);
    this.tell = (pixel) => series.map((one, index) => {
      const at = nearest(one.x, this.x, pixel);
      return at < 0 ? "" : `${series.length > 1 ? one.name + ": " : ""}${shown(lines[index][at])} at ${shown(one.x[at])}`;
    }).slice(0, 6).join("  ·  ");
  }

  path(xs, ys, color, alpha) {
    const pen = this.pen;
    pen.globalAlpha = alpha;
    pen.strokeStyle = pen.fillStyle = color;
    pen.lineWidth = 1.5;
    pen.beginPath();
    let open = false;
    for (let i = 0; i < xs.length; ++i) {
      const x = this.x.at(xs[i]), y = xs[i] === null || ys[i] === null ? NaN : this.y.at(ys[i]);
      if (!Number.isFinite(x) || !Number.isFinite(y)) {
        open = false;
      } else if (open) {
        pen.lineTo(x, y);
      } else {
        pen.moveTo(x, y);
        open = true;
      }
      if (xs.length <= 60 && alpha === 1 && Number.isFinite(y)) pen.fillRect(x - 1.5, y - 1.5, 3, 3);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  band(one, color) {
    const pen = this.pen;
    pen.globalAlpha = 0.18;
    pen.fillStyle = color;
    const floor = (value) => (this.y.log && value <= 0 ? this.y.low : value);
    for (let begin = 0; begin < one.x.length; ++begin) {
      if (one.low[begin] === null) continue;
      let end = begin;
      while (end < one.x.length && one.low[end] !== null) ++end;
      pen.beginPath();
      for (let i = begin; i < end; ++i) pen.lineTo(this.x.at(one.x[i]), this.y.at(floor(one.low[i])));
      for (let i = end; i-- > begin;) pen.lineTo(this.x.at(one.x[i]), this.y.at(floor(one.high[i])));
      pen.fill();
      begin = end;
    }
    pen.globalAlpha = 1;
  }

  legend(series) {
    if (series.length < 2) return;
    const pen = this.pen;
    pen.textAlign = "right";
    series.slice(0, 8).forEach((one, index) => {
      const y = TOP + 12 + 14 * index;
      pen.fillStyle = this.text;
      pen.fillText(one.name, this.width - RIGHT - 18, y);
      pen.fillStyle = one.color;
      pen.fillRect(this.width - RIGHT - 14, y - 6, 12, 4);
    });
  }

  // held: [{record, seconds, low, high, counts}], drawn over `axis`.
  histograms(held, {axis, logX, logY}) {
    this.again = () => this.histograms(held, {axis, logX, logY});
    this.begin();
    const xs = held.map((one) => one[axis]);
    this.axes([xs], [held.map((one) => one.low), held.map((one) => one.high)], logX, logY, axis);
    this.clipped((pen) => held.forEach((one, index) => {
      const next = index + 1 < held.length ? this.x.at(xs[index + 1]) : this.x.at(xs[index]) + 6;
      const left = this.x.at(xs[index]), most = Math.max(...one.counts);
      const bin = (one.high - one.low) / one.counts.length;
      pen.fillStyle = COLORS[0];
      one.counts.forEach((count, place) => {
        let bottom = this.y.at(one.low + place * bin);
        const top = this.y.at(one.low + (place + 1) * bin);
        if (!Number.isFinite(bottom)) bottom = this.height - BOTTOM;
        pen.globalAlpha = 0.85 * count / most;
        if (count && Number.isFinite(top)) pen.fillRect(left, top, Math.max(1, next - left), Math.max(1, bottom - top));
      });
      pen.globalAlpha = 1;
    }));
    this.plain = this.note.textContent = "";
  }

  words(text) {
    this.again = () => {
      this.begin();
      this.pen.fillStyle = this.text;
      text.split("\n").slice(0, 16).forEach((line, index) => this.pen.fillText(line, 4, 16 + 14 * index));
    };
    this.again();
    this.plain = this.note.textContent = "";
  }

  async image(image) {
    const picture = new Image();
    picture.src = `data:image/png;base64,${image.png}`;
    await picture.decode();
    this.again = () => {
      this.begin();
      const times = Math.min(this.width / image.width, this.height / image.height);
      this.pen.imageSmoothingEnabled = false;
      this.pen.drawImage(picture, (this.width - times * image.width) / 2, 0, times * image.width, times * image.height);
    };
    this.again();
    this.plain = this.note.textContent = `${shown(image.low)} to ${shown(image.high)}`;
  }
}

function nearest(xs, scale, pixel) {
  let best = -1, distance = Infinity;
  for (let i = 0; i < xs.length; ++i) {
    const off = xs[i] === null ? Infinity : Math.abs(scale.at(xs[i]) - pixel);
    if (off < distance) [best, distance] = [i, off];
  }
  return best;
}

// Records a second of each device, brighter where there are more: rows of cells.
export function drawDevices(canvas, devices) {
  const names = Object.keys(devices.records), row = 20, left = 66;
  canvas.style.height = `${Math.max(1, names.length) * row + 18}px`;
  const style = getComputedStyle(canvas), ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const pen = canvas.getContext("2d"), width = canvas.clientWidth - left - 8;
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const most = Math.max(1, ...names.flatMap((name) => devices.records[name]));
  const cells = Math.max(1, ...names.map((name) => devices.records[name].length));
  names.forEach((name, index) => {
    pen.fillStyle = style.getPropertyValue("--quiet");
    pen.globalAlpha = 1;
    pen.fillText(`device ${name}`, 0, index * row + 14);
    pen.fillStyle = style.getPropertyValue("--accent");
    devices.records[name].forEach((count, cell) => {
      pen.globalAlpha = count / most;
      pen.fillRect(left + cell / cells * width, index * row + 3, Math.max(1, width / cells), row - 6);
    });
  });
  pen.globalAlpha = 1;
  pen.fillStyle = style.getPropertyValue("--quiet");
  const seconds = `${shown(cells * devices.seconds)} s, at most ${shown(most / devices.seconds)} a second`;
  pen.textAlign = "right";
  pen.fillText(seconds, left + width, names.length * row + 12);
}
