// Turns the report's data into cards and plots. In a live page it asks for new data and redraws what changed.
"use strict";

const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 640;
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9_]+/g, "-");

// Plots by the id of their place; what a place shows stays until its data changes, so zooming survives an update.
const shown = new Map();

function layoutOf(figure) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true,
    title: { standoff: 8 }, tickfont: { size: 12 },
  };
  const named = figure.traces.filter((trace) => trace.showlegend !== false && trace.type !== "sankey").length;
  const layout = {
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 14, t: 12, b: 44 },
    // On a phone the legend has a line an entry.
    height: figure.height + (narrow() ? 17 * Math.max(0, named - 2) : 0),
    hovermode: "x unified", hoverlabel: { font: { size: 12 }, bgcolor: css("--card") },
    legend: { orientation: "h", x: 0, y: -0.21, yanchor: "top", font: { size: 12 }, traceorder: "normal" },
    showlegend: named > 1,
    dragmode: narrow() ? false : "zoom",
    uirevision: "kept",
    ...figure.layout,
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    const own = figure.layout[name];
    if (own || name !== "yaxis2") {
      const title = { ...axis.title, ...(own && own.title), font: { size: 13, color: css("--quiet") } };
      layout[name] = { ...axis, ...own, title };
    }
  }
  return layout;
}

function draw(place, figure) {
  const key = JSON.stringify([figure, css("--ink"), narrow()]);
  if (shown.get(place.id) === key) return;
  shown.set(place.id, key);
  const config = { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  Plotly.react(place, figure.traces, layoutOf(figure), config);
}

function runPanel(run) {
  const panel = element("section", "run");
  panel.style.setProperty("--run", run.color);
  panel.append(element("h3", "", run.name), element("div", "about", run.about));
  const tiles = element("div", "tiles");
  for (const tile of run.tiles) {
    const box = element("div", "tile");
    box.append(element("div", "value", tile.value), element("div", "label", tile.label));
    tiles.append(box);
  }
  panel.append(tiles);
  for (const problem of run.problems) panel.append(element("div", "note", problem));
  return panel;
}

function accountsTable(run) {
  const box = element("div", "scroll");
  const table = element("table");
  const head = table.insertRow();
  for (const [i, name] of ["fate", "samples", "tokens"].entries()) head.append(element("th", i ? "number" : "", name));
  for (const [fate, samples, tokens] of run.accounts.rows) {
    const row = table.insertRow();
    if (fate === "sum") row.className = "total";
    row.append(element("td", "", fate));
    for (const value of [samples, tokens]) row.append(element("td", "number", value.toLocaleString("en")));
  }
  box.append(table);
  const sound = run.accounts.violations.length === 0;
  const verdict = sound ? "The accounts add up." : "The accounts do not add up: " + run.accounts.violations.join("; ");
  box.append(element("p", sound ? "verdict" : "verdict bad", verdict));
  return box;
}

function card(data, runs) {
  const box = element("article", data.wide ? "card wide" : "card");
  box.id = "plot-" + data.key;
  box.append(element("h3", "", data.title), element("p", "caption", data.caption));
  if (data.keys.length > 1) {
    const keys = element("p", "keys");
    for (const key of data.keys) {
      const one = element("span", "", key.run);
      one.style.setProperty("--run", key.color);
      keys.append(one);
    }
    box.append(keys);
  }
  const plots = element("div", "plots");
  data.figures.forEach((figure, i) => {
    const cell = element("div", "cell");
    if (figure.run) cell.append(element("p", "of", figure.run));
    const place = element("div", "plot");
    place.id = `${data.key}-${i}`;
    cell.append(place);
    plots.append(cell);
  });
  box.append(plots);
  for (const note of data.notes) {
    box.append(element("div", "note", (note.run ? note.run + ": " : "") + "not drawn: " + note.text));
  }
  if (data.key === "ledger") {
    for (const run of runs.filter((one) => one.accounts)) {
      if (runs.length > 1) box.append(element("p", "of", run.name));
      box.append(accountsTable(run));
    }
  }
  const links = element("p", "links", data.metrics.length > 1 ? "definitions: " : "definition: ");
  for (const metric of data.metrics) {
    const link = element("a", "", metric);
    link.href = "#def-" + slug(metric);
    links.append(link);
  }
  box.append(links);
  return box;
}

function definitionList(rows) {
  const list = element("dl");
  for (const row of rows) {
    const box = element("div");
    box.id = "def-" + slug(row.name);
    const term = element("dt", "", row.name);
    if (row.unit && row.unit !== "–") term.append(element("span", "unit", `  ${row.unit}`));
    box.append(term, element("dd", "", row.meaning.replace(/`/g, "")));
    list.append(box);
  }
  return list;
}

// The frame of the page: everything but the plots themselves. Rebuilt only when cards come, go or change their words.
function build(report) {
  const sections = document.getElementById("sections");
  const nav = document.getElementById("nav");
  sections.replaceChildren();
  nav.replaceChildren();
  shown.clear();
  const chapter = (title, body) => {
    const heading = element("h2", "", title);
    heading.id = slug(title);
    const link = element("a", "", title);
    link.href = "#" + heading.id;
    nav.append(link);
    sections.append(heading, body);
  };
  for (const section of report.sections) {
    const cards = element("div", "cards");
    for (const one of section.cards) cards.append(card(one, report.runs));
    chapter(section.title, cards);
  }
  chapter("Definitions", definitionList(report.definitions));
}

const frameOf = (report) =>
  JSON.stringify([report.sections.map((section) => section.cards.map((one) => [one.notes, one.keys, one.figures.length])),
    report.runs.map((run) => run.accounts)]);

let frame = "";
let current = null;

function show(report) {
  current = report;
  document.getElementById("made").textContent = report.made;
  document.getElementById("runs").replaceChildren(...report.runs.map(runPanel));
  const wanted = frameOf(report);
  if (wanted !== frame) build(report);
  frame = wanted;
  for (const section of report.sections) {
    for (const one of section.cards) {
      one.figures.forEach((figure, i) => draw(document.getElementById(`${one.key}-${i}`), figure));
    }
  }
  document.body.dataset.drawn = String(shown.size);
}

async function follow(url, everyMs) {
  const state = document.getElementById("live");
  let seen = "";
  for (;;) {
    try {
      const answer = await fetch(`${url}&seen=${encodeURIComponent(seen)}`);
      if (answer.status === 200) {
        const news = await answer.json();
        seen = news.stamp;
        show(news.report);
      } else if (answer.status !== 204) throw new Error(`status ${answer.status}`);
      state.textContent = "● live";
      state.className = "live";
    } catch (error) {
      state.textContent = "○ the watch has stopped; what is shown is the last it knew";
      state.className = "live lost";
    }
    await new Promise((done) => setTimeout(done, everyMs));
  }
}

const again = () => { if (current) show(current); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
matchMedia("(max-width: 639px)").addEventListener("change", again);

const given = JSON.parse(document.getElementById("report").textContent);
if (given.report) show(given.report);
if (given.follow) follow(given.follow, given.every_ms);
