// SPDX-License-Identifier: Apache-2.0
// The parts that the pages share: questions to the server, elements, tables, light and dark.
// Names come from a stream, whose writer may be anybody: they become text alone, never HTML.

export const byId = (id) => document.getElementById(id);

export async function ask(path, query = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(query)}`);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

export function element(kind, text = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

// titles and rows: lists of texts, numbers, or {key, make}, whose element is made where the key is new.
export function fill(table, titles, rows) {
  const keys = (cells) => cells.map((cell) => cell.key ?? cell);
  const text = JSON.stringify([keys(titles), rows.map(keys)]);
  if (table.dataset.held === text) return;  // or a selection in it would be lost
  table.dataset.held = text;
  const made = (kind, cell) => {
    if (cell.key === undefined) return element(kind, String(cell), String(cell).length > 60 ? "text" : "");
    const held = element(kind);
    held.append(cell.make());
    return held;
  };
  const lines = [titles, ...rows].map((cells, index) => {
    const line = element("tr");
    line.append(...cells.map((cell) => made(index ? "td" : "th", cell)));
    return line;
  });
  table.replaceChildren(...lines);
}

// Calls `refresh` a few times a second, and when something on the page changes; one call at a time.
export function keepFresh(work, period) {
  let running = false, again = false;
  const refresh = async () => {
    if (running) {
      again = true;  // what is asked for now may have come too late for the one that runs
      return;
    }
    running = true;
    try {
      await work();
    } catch (error) {
      byId("head").replaceChildren(element("span", `no answer from the program: ${error.message}`, "lost"));
    } finally {
      running = false;
      if (again) {
        again = false;
        setTimeout(refresh);
      }
    }
  };
  byId("tools").addEventListener("input", refresh);
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", refresh);
  setInterval(() => { if (!document.hidden) refresh(); }, period);
  beginTheme(refresh);
  refresh();
  return refresh;
}

function beginTheme(refresh) {
  const root = document.documentElement, dark = window.matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try {
    kept = localStorage.getItem("theme");
  } catch { /* a browser that keeps nothing */ }
  root.dataset.theme = kept || (dark.matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch { /* as above */ }
    refresh();
  });
}
