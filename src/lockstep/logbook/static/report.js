"use strict";
// The report's behaviour: everything is drawn from the JSON in #data, and every state change draws the curves anew.
const data = JSON.parse(document.getElementById("data").textContent);
const state = {axis: "step", smoothing: 0, log: false, hidden: new Set(), zoom: null};
const charts = [];
window.report = {data, state, charts}; // for the browser's console, and for tests

// A curve may be called `constructor`: what every object has is none of a run's.
const own = (held, key) => Object.hasOwn(held, key) ? held[key] : undefined;
const by = id => document.getElementById(id);
function make(name, text, attributes = {}) {
  const node = document.createElement(name);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
const color = index => getComputedStyle(document.documentElement).getPropertyValue(`--c${index % 8}`).trim();
const theme = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- numbers ---
function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return (value * 100).toFixed(2) + " %";
  if (unit === "percent") return value.toFixed(1) + " %";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return String(+value.toPrecision(5));
}
function seconds(value) {
  if (value < 120) return `${+value.toFixed(1)} s`;
  if (value < 7200) return `${+(value / 60).toFixed(1)} min`;
  return `${+(value / 3600).toFixed(2)} h`;
}
const place = (value, axis) =>
  axis === "time" ? seconds(value) : axis === "epoch" ? `epoch ${+value.toFixed(2)}` : `step ${Math.round(value)}`;

// --- curves ---
function interpolate(x, from, to) {
  if (x <= from[0]) return to[0];
  let low = 0, high = from.length - 1;
  if (x >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= x) low = middle; else high = middle;
  }
  return to[low] + (to[high] - to[low]) * (x - from[low]) / ((from[high] - from[low]) || 1);
}
function onAxis(run, steps) {
  if (state.axis === "step") return steps;
  const column = own(run.curves, state.axis === "time" ? "time_s" : "epoch");
  if (!column) return null;
  const first = state.axis === "epoch" ? 1 : 0; // the column counts from 0
  return steps.map(step => interpolate(step, column[0], column[1]) + first);
}
function rising(x, y) { // a join needs unique, rising places
  const keep = x.map((value, i) => i === x.length - 1 || x[i + 1] > value);
  return [x.filter((_, i) => keep[i]), y.filter((_, i) => keep[i])];
}
function smooth(values, weight) { // exponential mean, without the pull towards zero at its start
  let mean = 0, mass = 0;
  return values.map(value => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
function curvesOf(panel) {
  const found = [];
  data.runs.forEach((run, index) => {
    if (state.hidden.has(index)) return;
    const curve = own(run.curves, panel.key);
    if (!curve || !curve[0].length) return;
    const x = onAxis(run, curve[0]);
    if (!x) return;
    const [places, values] = rising(x, curve[1]);
    if (state.smoothing > 0 && values.length > 2 && panel.smooth) {
      found.push({index, label: run.label, x: places, y: values, faint: true});
      found.push({index, label: run.label, x: places, y: smooth(values, state.smoothing)});
    } else found.push({index, label: run.label, x: places, y: values});
  });
  return found;
}

function draw() {
  for (const chart of charts.splice(0)) chart.plot.destroy();
  const area = by("charts");
  area.textContent = "";
  for (const panel of data.panels) drawPanel(area, panel);
  by("reset").disabled = state.zoom === null;
}
function drawPanel(area, panel) {
  const curves = curvesOf(panel);
  const box = area.appendChild(make("div", null, {class: "chart"}));
  box.appendChild(make("h3", panel.title));
  if (!curves.length) {
    box.appendChild(make("p", "no run that is switched on has this curve", {class: "empty"}));
    return;
  }
  const axis = state.axis;
  const tip = box.appendChild(make("div", null, {class: "tip"}));
  const width = Math.max(200, box.clientWidth - 22);
  const plot = new uPlot(options(panel, curves, axis, width, tip, box), joined(curves), box);
  charts.push({panel, plot, curves, axis, box});
  touch(plot);
}
const joined = curves => uPlot.join(curves.map(curve => [curve.x, curve.y]));

function options(panel, curves, axis, width, tip, box) {
  const line = {stroke: theme("--muted"), grid: {stroke: theme("--grid"), width: 1}, ticks: {show: false}, font: "12px system-ui"};
  const isLog = state.log && panel.loss && curves.every(curve => curve.y.every(value => value > 0));
  const spread = values => values.map(value => value === null ? "" : isLog && Math.log10(value) % 1 ? "" : shortened(value, panel.unit));
  return {
    width, height: 240, legend: {show: false},
    scales: {
      x: {time: false, ...(state.zoom && state.zoom.axis === axis ? {min: state.zoom.min, max: state.zoom.max, auto: false} : {})},
      y: isLog ? {distr: 3} : {},
    },
    axes: [
      {...line, values: (_, values) => values.map(value => axis === "time" ? seconds(value) : value % 1 ? "" : value >= 10000 ? `${value / 1000}k` : value)},
      {...line, size: 58, values: (_, values) => spread(values)},
    ],
    series: [{}, ...curves.map(curve => ({
      label: curve.label, stroke: color(curve.index), alpha: curve.faint ? 0.28 : 1, width: curve.faint ? 1 : 1.8, spanGaps: true,
      points: {show: curve.x.length <= 30 && !curve.faint, size: 5, fill: color(curve.index)},
    }))],
    cursor: {
      drag: {x: true, y: false, dist: 6, setScale: false},
      sync: {key: axis},
      dataIdx: (plot, series, index) => nearest(plot.data[series], index),
      points: {size: 7, show: (plot, i) => !curves[i - 1].faint},
    },
    hooks: {
      setCursor: [plot => showTip(plot, panel, curves, axis, tip, box)],
      setSelect: [plot => zoom(plot, axis)],
    },
  };
}
function shortened(value, unit) {
  if (unit === "share") return `${+(value * 100).toFixed(2)} %`;
  if (unit === "percent") return `${+value.toFixed(1)} %`;
  return Math.abs(value) < 1e-3 && value !== 0 || Math.abs(value) >= 1e5 ? value.toExponential(0) : +value.toPrecision(6);
}
function nearest(values, index) {
  for (let away = 0; away < values.length; away++) {
    if (values[index - away] != null) return index - away;
    if (values[index + away] != null) return index + away;
  }
  return index;
}
function showTip(plot, panel, curves, axis, tip, box) {
  const {left, top, idx} = plot.cursor;
  if (idx === null || left < 0 || !box.matches(":hover") && box !== touched) { tip.style.display = "none"; return; }
  tip.textContent = "";
  tip.appendChild(make("div", place(plot.posToVal(left, "x"), axis)));
  curves.forEach((curve, i) => {
    if (curve.faint) return;
    const row = tip.appendChild(make("div"));
    row.appendChild(make("i")).style.background = color(curve.index);
    row.appendChild(make("span", curve.label));
    row.appendChild(make("b", shown(plot.data[i + 1][plot.cursor.idxs[i + 1]], panel.unit)));
  });
  tip.style.display = "block";
  const over = plot.over.getBoundingClientRect(), outer = box.getBoundingClientRect();
  const x = over.left - outer.left + left, fits = x + 16 + tip.offsetWidth < outer.width;
  tip.style.left = `${Math.max(4, fits ? x + 14 : x - tip.offsetWidth - 14)}px`;
  tip.style.top = `${over.top - outer.top + Math.min(top, over.height - tip.offsetHeight)}px`;
}
function zoom(plot, axis) {
  if (plot.select.width < 6) return;
  const [start, stop] = [plot.select.left, plot.select.left + plot.select.width];
  state.zoom = {axis, min: plot.posToVal(start, "x"), max: plot.posToVal(stop, "x")};
  plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
  for (const chart of charts) if (chart.axis === axis) chart.plot.setScale("x", {min: state.zoom.min, max: state.zoom.max});
  by("reset").disabled = false;
}
function showAll() { state.zoom = null; draw(); }

// A finger drawn sideways selects as the mouse does; up and down still scrolls the page.
let touched = null;
function touch(plot) {
  const pass = (type, event) => plot.over.dispatchEvent(new MouseEvent(type, {
    bubbles: true, clientX: event.clientX, clientY: event.clientY, movementX: 1, button: 0, // uPlot drops moves of no length
    detail: 1, view: window}));
  const on = (type, act) => plot.over.addEventListener(type, event => { if (event.pointerType === "touch") act(event); });
  on("pointerdown", event => { touched = plot.root.parentNode; pass("mouseenter", event); pass("mousemove", event); pass("mousedown", event); });
  on("pointermove", event => pass("mousemove", event));
  on("pointerup", event => pass("mouseup", event));
  on("pointercancel", event => { pass("mouseup", event); pass("mouseleave", event); });
  plot.over.addEventListener("dblclick", showAll);
}

// --- runs, controls, tables ---
function drawRuns() {
  const area = by("runs");
  data.runs.forEach((run, index) => {
    const button = area.appendChild(make("button", null, {"aria-pressed": "true", title: run.run_id}));
    button.style.setProperty("--run", `var(--c${index % 8})`);
    button.append(make("i"), make("span", run.label), make("small", run.headline));
    button.onclick = () => {
      state.hidden.has(index) ? state.hidden.delete(index) : state.hidden.add(index);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      draw();
    };
  });
}
function drawControls() {
  for (const name of ["step", "epoch", "time"]) {
    const button = by("axis").appendChild(make("button", name, {"aria-pressed": String(name === state.axis)}));
    button.onclick = () => {
      state.axis = name;
      state.zoom = null;
      for (const other of by("axis").children) other.setAttribute("aria-pressed", String(other === button));
      draw();
    };
  }
  by("smoothing").oninput = event => { state.smoothing = +event.target.value; by("smoothed").textContent = event.target.value; draw(); };
  by("log").onchange = event => { state.log = event.target.checked; draw(); };
  by("reset").onclick = showAll;
}
const NUMBER = /^(–|[$×]?-?[\d.,]+(e[+-]?\d+)?(\s(%|ms|s|min|h|d|GiB|MB|images)[^(]*)?( ?\(.*\))?)$/;
function fill(id, table) {
  const node = by(id);
  if (!table.rows.length) { node.replaceWith(make("p", table.none || "nothing recorded", {class: "empty"})); return; }
  const head = node.appendChild(make("thead")).appendChild(make("tr"));
  for (const name of table.head) head.appendChild(make("th", name));
  const body = node.appendChild(make("tbody"));
  for (const cells of table.rows) {
    const row = body.appendChild(make("tr"));
    cells.forEach((cell, i) => row.appendChild(make(i ? "td" : "th", cell, i && NUMBER.test(cell) ? {class: "n"} : {})));
  }
}
function drawConfusion() {
  const held = data.runs.map((run, index) => [run, index]).filter(([run]) => run.confusion);
  if (!held.length) { by("confusion-section").remove(); return; }
  const select = by("confusion-run");
  for (const [run, index] of held) select.appendChild(make("option", run.label, {value: index}));
  select.onchange = () => fillConfusion(data.runs[+select.value].confusion);
  fillConfusion(held[0][0].confusion);
}
function fillConfusion({names, counts}) {
  const table = by("confusion");
  table.textContent = "";
  const head = table.appendChild(make("tr"));
  head.appendChild(make("th", "true \\ predicted"));
  for (const name of names) head.appendChild(make("th", name));
  head.appendChild(make("th", "right"));
  counts.forEach((line, i) => {
    const row = table.appendChild(make("tr"));
    const total = line.reduce((sum, count) => sum + count, 0);
    row.appendChild(make("th", names[i]));
    line.forEach((count, j) => {
      const share = total ? count / total : 0;
      const cell = row.appendChild(make("td", count || "", {title: `${names[i]} taken for ${names[j]}: ${count} (${(share * 100).toFixed(1)} %)`}));
      cell.style.background = `color-mix(in srgb, var(--c${i === j ? 0 : 1}) ${Math.round(Math.sqrt(share) * 75)}%, transparent)`;
    });
    row.appendChild(make("td", total ? `${(line[i] / total * 100).toFixed(1)} %` : "–"));
  });
}
function drawNotes() {
  for (const text of data.cautions) by("cautions").appendChild(make("p", text));
  const noted = data.runs.filter(run => run.note);
  if (!noted.length) { by("notes-section").remove(); return; }
  for (const run of noted) by("notes").append(make("div", `${run.label} (${run.run_id})`), make("pre", run.note));
}
function drawCommands() {
  for (const run of data.runs) by("commands").append(make("div", `${run.label} (${run.run_id})`), make("pre", run.command || "not in the record"));
}

by("subtitle").textContent = data.subtitle;
drawRuns();
drawControls();
draw();
fill("numbers", data.numbers);
fill("settings", data.settings);
drawConfusion();
drawNotes();
drawCommands();
let drawnAt = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnAt) { drawnAt = innerWidth; draw(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
