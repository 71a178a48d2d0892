// SPDX-License-Identifier: Apache-2.0
// Runs the site's own search, the theme's worker, without a browser.
//   node site_search.cjs WORKER INDEX < QUERIES  prints for each line the pages found, best first
const fs = require("fs");
const vm = require("vm");

const [worker, index] = process.argv.slice(2);
const queries = fs.readFileSync(0, "utf8").split("\n").filter(Boolean);

let receive, answered;
const scope = {
  console,
  addEventListener: (_, listener) => { receive = listener; },
  postMessage: (message) => answered(message),
};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(worker, "utf8"), scope);

const ask = (type, data) => new Promise((resolve) => {
  answered = resolve;
  receive({ data: { type, data } });
});

(async () => {
  await ask(0, { ...JSON.parse(fs.readFileSync(index, "utf8")), options: { suggest: true } });
  const found = {};
  for (const query of queries) {
    const { data } = await ask(2, query);
    found[query] = data.items.map((hits) => hits.map((hit) => hit.location));
  }
  console.log(JSON.stringify(found));
})();
