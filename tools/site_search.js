// What the site's own search shows: the script that a browser runs in a worker, in Node.
//
//     node tools/site_search.js SITE QUERY...
//
// Prints a JSON array for each query, a line each: addresses of the pages and sections that the list
// shows, in its order. The messages are those of mkdocs-material 9: 0 set up, 2 query.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const directory = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(directory).find((name) => /^search.*\.js$/.test(name));
const waiting = [];
let heard;
const worker = {
    console, setTimeout, clearTimeout, URL, performance,
    location: { href: `file://${site}/` },
    importScripts: () => {},
    addEventListener: (kind, listener) => { if (kind === "message") heard = listener; },
    postMessage: (message) => waiting.shift()(message),
};
worker.self = worker.window = worker.globalThis = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(directory, script), "utf8"), worker);

function ask(type, data) {
    return new Promise((answered) => {
        waiting.push(answered);
        heard({ data: { type, data } });
    });
}

async function main() {
    const index = fs.readFileSync(path.join(site, "search/search_index.json"), "utf8");
    await ask(0, { ...JSON.parse(index), options: { suggest: true } });
    for (const query of queries) {
        const { items } = (await ask(2, query)).data;
        console.log(JSON.stringify(items.map((page) => page.map((hit) => hit.location))));
    }
}

main();
