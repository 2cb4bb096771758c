// Elements, numbers, axes and tooltips: what all charts use.
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const NUM_COLOURS = 6;
const MAX_LABEL_LENGTH = 14;

function fill(node, attributes, parent, text) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function svg(name, attributes = {}, parent = null, text = null) {
  return fill(document.createElementNS(SVG_NAMESPACE, name), attributes, parent, text);
}
function html(name, attributes = {}, parent = null, text = null) {
  return fill(document.createElement(name), attributes, parent, text);
}

// Colours are variables of the style sheet: light and dark need no redraw, except for the shades of heat maps.
const colourOf = (style) => `var(--c${style % NUM_COLOURS})`;
const dashesOf = (style) => DASHES[Math.floor(style / NUM_COLOURS) % DASHES.length];

function formatNumber(value, percent) {
  if (percent) return `${(100 * value).toFixed(1)} %`;
  if (Math.abs(value) >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}
function ticksBetween(low, high, count) {
  const spacing = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(spacing));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= spacing);
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    values.push(Math.abs(value) < step * 1e-6 ? 0 : value); // never -0
  }
  return { step, values };
}
function formatTick(value, step, percent) {
  if (percent) return `${(100 * value).toFixed(step < 0.0095 ? 1 : 0)} %`;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// The drawing area of a figure: the canvas, and the edges of the space inside the axes.
function createArea(plot, figure, height, left, bottom, top = 12) {
  const width = plot.clientWidth;
  const canvas = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, plot);
  canvas.setAttribute("aria-label", figure.title);
  return { canvas, left, top, right: width - 10, bottom: height - bottom, width, height };
}
// Space above an axis for its label: a tick at the top would else be drawn over it.
const LABELLED_TOP = 28;
function drawVerticalAxis(area, low, high, percent, label) {
  const y = (value) => area.bottom - ((value - low) / (high - low || 1)) * (area.bottom - area.top);
  const { step, values } = ticksBetween(low, high, Math.max(2, (area.bottom - area.top) / 42));
  for (const value of values) {
    svg("line", { class: "rule", x1: area.left, x2: area.right, y1: y(value), y2: y(value) }, area.canvas);
    const position = { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" };
    svg("text", position, area.canvas, formatTick(value, step, percent));
  }
  svg("text", { x: 2, y: 9 }, area.canvas, percent ? "" : label);
  return y;
}
function drawHorizontalAxis(area, low, high, label, integers) {
  const x = (value) => area.left + ((value - low) / (high - low || 1)) * (area.right - area.left);
  const { step, values } = ticksBetween(low, high, Math.max(2, (area.right - area.left) / 62));
  svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, area.canvas);
  for (const value of values) {
    if (integers && !Number.isInteger(Number(value.toFixed(6)))) continue;
    const anchor = x(value) > area.right - 14 ? "end" : "middle";
    const position = { x: x(value), y: area.bottom + 16, "text-anchor": anchor };
    svg("text", position, area.canvas, formatTick(value, integers ? Math.max(1, step) : step, false));
  }
  drawHorizontalLabel(area, area.bottom + 33, label);
  return x;
}
function drawHorizontalLabel(area, y, label) {
  svg("text", { x: (area.left + area.right) / 2, y, "text-anchor": "middle" }, area.canvas, label);
}

const shorten = (name) => (name.length > MAX_LABEL_LENGTH ? `${name.slice(0, MAX_LABEL_LENGTH - 1)}…` : name);
const longest = (names) => Math.max(0, ...names.map((name) => name.length));
const labelWidth = (names) => 7 * Math.min(MAX_LABEL_LENGTH, Math.max(2, longest(names)));

// Labels for the rows or columns of a table between two edges; only every n-th where not all fit.
function drawLabels(area, names, count, from, to, direction) {
  if (!names.length) return;
  const space = Math.abs(to - from) / count;
  const needed = direction === "across" ? 9 + 7 * Math.max(1, longest(names.map(shorten))) : 14;
  const every = Math.max(1, Math.ceil(needed / space));
  for (let i = 0; i < count; i += every) {
    const middle = from + (i + 0.5) * space;
    const position = {
      down: { x: area.left - 6, y: middle + 4, "text-anchor": "end" },
      across: { x: middle, y: area.bottom + 16, "text-anchor": "middle" },
      rotated: { transform: `translate(${middle + 4} ${area.bottom + 12}) rotate(-50)`, "text-anchor": "end" },
    }[direction];
    svg("text", position, area.canvas, shorten(names[i]));
  }
}
function drawLegend(plot, entries) {
  if (!entries.length) return;
  const legend = html("div", { class: "legend" }, plot);
  for (const [name, colour, dashes] of entries) {
    const entry = html("span", {}, legend);
    if (dashes === undefined) html("i", { style: `background:${colour}` }, entry);
    else drawSample(entry, colour, dashes);
    entry.append(name);
  }
}

// A piece of a curve, as in the chart.
function drawSample(parent, colour, dashes) {
  const sample = svg("svg", { width: 24, height: 8, "aria-hidden": "true" }, parent);
  const stroke = { stroke: colour, "stroke-dasharray": dashes, "stroke-width": 3 };
  svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, ...stroke }, sample);
}

function createTooltip(plot) {
  const box = html("div", { class: "tooltip", hidden: "" }, plot);
  return {
    show(title, rows, x, y) {
      box.replaceChildren();
      html("div", { style: "font-weight:600" }, box, title);
      for (const [text, colour] of rows) {
        const line = html("div", {}, box);
        if (colour) html("b", { style: `color:${colour}` }, line, "● ");
        line.append(text);
      }
      box.hidden = false;
      const overflows = x + box.offsetWidth + 18 > plot.clientWidth;
      box.style.left = `${Math.max(0, overflows ? x - box.offsetWidth - 12 : x + 12)}px`;
      box.style.top = `${Math.max(0, Math.min(y - 10, plot.clientHeight - box.offsetHeight))}px`;
    },
    hide() { box.hidden = true; },
    text() { return [...box.children].map((line) => line.textContent.replace("● ", "")).join("; "); },
  };
}
// Calls onMove(x, y, tooltip, guide) for a place of the figure: under the pointer, or chosen with the arrow keys among
// columns × rows places, of which placeOf(column, row) is the position. The guide is a vertical line.
function onReading(plot, area, columns, rows, placeOf, onMove) {
  const tooltip = createTooltip(plot);
  const spoken = html("div", { class: "spoken", "aria-live": "polite" }, plot);
  const guide = svg("line", { class: "axis", y1: area.top, y2: area.bottom, visibility: "hidden" }, area.canvas);
  const hide = () => {
    tooltip.hide();
    guide.setAttribute("visibility", "hidden");
  };
  area.canvas.addEventListener("pointermove", (event) => {
    const box = area.canvas.getBoundingClientRect();
    onMove(event.clientX - box.left, event.clientY - box.top, tooltip, guide);
  });
  area.canvas.addEventListener("pointerleave", hide);
  if (!columns || !rows) return;
  let column = -1, row = 0;
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const keys = rows > 1 ? "arrow keys" : "left and right arrow keys";
  area.canvas.setAttribute("tabindex", "0");
  area.canvas.setAttribute("aria-label", `${area.canvas.getAttribute("aria-label")}. The ${keys} read its values.`);
  area.canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); return; }
    if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns - 1;
    else if (event.key in STEPS && (rows > 1 || STEPS[event.key][0])) {
      column = within(column + STEPS[event.key][0], columns);
      row = within(row + STEPS[event.key][1], rows);
    } else return;
    event.preventDefault();
    onMove(...placeOf(column, row), tooltip, guide);
    spoken.textContent = tooltip.text();
  });
  area.canvas.addEventListener("blur", hide);
}
