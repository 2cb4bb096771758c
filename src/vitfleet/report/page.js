"use strict";
// Draws the report's figures from their data. Colours come from the style sheet, so that light and dark need no redraw
// but for the shades of tables. Every figure is drawn for the width it has and again when that changes.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const COLOURS = 6;
  const hidden = new Set();
  const redraws = [];

  function svg(name, attributes = {}, parent = null, text = null) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  function html(name, attributes = {}, parent = null, text = null) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  const colour = (style) => `var(--c${style % COLOURS})`;
  const dash = (style) => DASHES[Math.floor(style / COLOURS) % DASHES.length];

  function number(value, percent) {
    if (percent) return `${(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return String(Number(value.toPrecision(4)));
  }
  function ticks(low, high, wanted) {
    const raw = (high - low || 1) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
      found.push(Math.abs(at) < step * 1e-6 ? 0 : at); // never -0
    }
    return { step, found };
  }
  function tickLabel(value, step, percent) {
    if (percent) return `${(100 * value).toFixed(step < 0.0095 ? 1 : 0)} %`;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function frame(plot, figure, height, left, bottom) {
    const width = plot.clientWidth;
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, plot);
    picture.setAttribute("aria-label", figure.title);
    return { picture, left, top: 12, right: width - 10, bottom: height - bottom, width, height };
  }
  function verticalAxis(area, low, high, percent, label) {
    const y = (value) => area.bottom - ((value - low) / (high - low || 1)) * (area.bottom - area.top);
    const { step, found } = ticks(low, high, Math.max(2, (area.bottom - area.top) / 42));
    for (const at of found) {
      svg("line", { class: "rule", x1: area.left, x2: area.right, y1: y(at), y2: y(at) }, area.picture);
      const place = { x: area.left - 6, y: y(at) + 4, "text-anchor": "end" };
      svg("text", place, area.picture, tickLabel(at, step, percent));
    }
    svg("text", { x: 2, y: 9 }, area.picture, percent ? "" : label);
    return y;
  }
  function horizontalAxis(area, low, high, label, whole) {
    const x = (value) => area.left + ((value - low) / (high - low || 1)) * (area.right - area.left);
    const { step, found } = ticks(low, high, Math.max(2, (area.right - area.left) / 62));
    svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, area.picture);
    for (const at of found) {
      if (whole && !Number.isInteger(Number(at.toFixed(6)))) continue;
      const anchor = x(at) > area.right - 14 ? "end" : "middle";
      const place = { x: x(at), y: area.bottom + 16, "text-anchor": anchor };
      svg("text", place, area.picture, tickLabel(at, whole ? Math.max(1, step) : step, false));
    }
    const middle = { x: (area.left + area.right) / 2, y: area.bottom + 33, "text-anchor": "middle" };
    svg("text", middle, area.picture, label);
    return x;
  }

  function tip(plot) {
    const box = html("div", { class: "tip", hidden: "" }, plot);
    return {
      show(rows, x, y) {
        box.replaceChildren();
        for (const [text, tint, strong] of rows) {
          const line = html("div", {}, box);
          if (tint) html("b", { style: `color:${tint}` }, line, "● ");
          line.append(text);
          if (strong) line.style.fontWeight = 600;
        }
        box.hidden = false;
        const beyond = x + box.offsetWidth + 18 > plot.clientWidth;
        box.style.left = `${Math.max(0, beyond ? x - box.offsetWidth - 12 : x + 12)}px`;
        box.style.top = `${Math.max(0, Math.min(y - 10, plot.clientHeight - box.offsetHeight))}px`;
      },
      hide() { box.hidden = true; },
    };
  }
  function follow(plot, area, move) {
    const hint = tip(plot);
    const guide = svg("line", { class: "axis", y1: area.top, y2: area.bottom, visibility: "hidden" }, area.picture);
    area.picture.addEventListener("pointermove", (event) => {
      const box = area.picture.getBoundingClientRect();
      move(event.clientX - box.left, event.clientY - box.top, hint, guide);
    });
    area.picture.addEventListener("pointerleave", () => {
      hint.hide();
      guide.setAttribute("visibility", "hidden");
    });
  }

  function path(xs, ys, x, y) {
    let text = "", down = false;
    xs.forEach((at, i) => {
      if (ys[i] === null) { down = false; return; }
      text += `${down ? "L" : "M"}${x(at).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
      down = true;
    });
    return text;
  }
  function drawLines(plot, figure, state) {
    const view = figure.views[state.view] || figure.views[0];
    const shown = view.series.filter((one) => !hidden.has(one.name));
    const area = frame(plot, figure, plot.clientWidth < 480 ? 260 : 320, 52, 42);
    const reached = shown.flatMap((one) => [...one.y, ...one.low, ...one.high]).filter((one) => one !== null);
    const across = shown.flatMap((one) => one.x);
    const top = Math.max(...reached, 0) || 1;
    const high = figure.percent ? Math.min(1, top * 1.05) : top * 1.05;
    const low = Math.min(0, ...shown.flatMap((one) => one.y));
    const y = verticalAxis(area, low, high, figure.percent, figure.label);
    const first = view.name === "rounds" || view.name === "tasks" ? 1 : 0;
    const x = horizontalAxis(area, first, Math.max(...across, first + 1), view.label, first === 1);
    // A band may reach beyond what can be: below no bytes, above every image.
    const within = (values) => values.map((value) => Math.max(low, Math.min(high, value)));
    for (const one of shown) {
      if (one.low.length) {
        const back = one.x.map((_, i) => one.x.length - 1 - i);
        const outline =
          path(one.x, within(one.low), x, y) +
          path(back.map((i) => one.x[i]), within(back.map((i) => one.high[i])), x, y).replace("M", "L") + "Z";
        svg("path", { d: outline, fill: colour(one.style), "fill-opacity": 0.14, class: "band" }, area.picture);
      }
    }
    for (const one of shown) {
      const stroke = { stroke: colour(one.style), "stroke-dasharray": dash(one.style), "stroke-width": 2 };
      const shape = { fill: "none", "stroke-linejoin": "round", class: "mark", d: path(one.x, one.y, x, y) };
      svg("path", { ...shape, ...stroke }, area.picture);
      if (one.x.length <= 12) {
        one.x.forEach((at, i) => {
          if (one.y[i] === null) return;
          svg("circle", { cx: x(at), cy: y(one.y[i]), r: 3, fill: colour(one.style) }, area.picture);
        });
      }
    }
    follow(plot, area, (at, over, hint, guide) => {
      let near = null;
      for (const value of across) if (near === null || Math.abs(x(value) - at) < Math.abs(x(near) - at)) near = value;
      if (near === null) return;
      guide.setAttribute("x1", x(near));
      guide.setAttribute("x2", x(near));
      guide.setAttribute("visibility", "visible");
      const rows = shown
        .map((one) => {
          // The last value at or before: on axes other than rounds, curves have points of their own.
          let i = one.x.length - 1;
          while (i >= 0 && one.x[i] > near + 1e-9) i -= 1;
          return i < 0 || one.y[i] === null ? null : [one, one.y[i]];
        })
        .filter((one) => one !== null)
        .sort((a, b) => b[1] - a[1])
        .map(([one, value]) => [`${one.name}  ${number(value, figure.percent)}`, colour(one.style)]);
      hint.show([[`${view.label} ${number(near, false)}`, null, true], ...rows], x(near), over);
    });
  }

  function rgb(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map(Number);
  }
  const LONGEST_NAME = 14;
  const cut = (name) => (name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME - 1)}…` : name);
  function nameAxis(area, names, count, from, to, vertical, turned) {
    if (!names.length) return;
    const space = Math.abs(to - from) / count;
    const upright = vertical || turned;
    const needed = upright ? 14 : 9 + 7 * Math.max(1, ...names.map((name) => cut(name).length));
    const every = Math.max(1, Math.ceil(needed / space));
    for (let i = 0; i < count; i += every) {
      const middle = from + (i + 0.5) * space;
      const text = cut(names[i]);
      if (vertical) {
        svg("text", { x: area.left - 6, y: middle + 4, "text-anchor": "end" }, area.picture, text);
      } else if (turned) {
        const place = `translate(${middle + 4} ${area.bottom + 12}) rotate(-50)`;
        svg("text", { transform: place, "text-anchor": "end" }, area.picture, text);
      } else {
        svg("text", { x: middle, y: area.bottom + 16, "text-anchor": "middle" }, area.picture, text);
      }
    }
  }
  function roomFor(names) { return 7 * Math.min(LONGEST_NAME, Math.max(2, ...names.map((name) => name.length))); }

  function drawHeat(plot, figure) {
    const rows = figure.values.length, columns = Math.max(...figure.values.map((row) => row.length));
    const turned = Math.max(0, ...figure.columns.map((name) => name.length)) > 4;
    const below = turned ? 24 + 0.77 * roomFor(figure.columns) : 42;
    const tall = Math.max(110, Math.min(rows > 60 ? 380 : 30 * rows, 560)) + below + 12;
    const area = frame(plot, figure, tall, 26 + roomFor(figure.rows), below);
    const all = figure.values.flat().filter((one) => one !== null);
    const most = figure.percent ? 1 : Math.max(...all, 1e-12);
    const [from, to] = figure.warm ? [rgb("--warm0"), rgb("--warm1")] : [rgb("--cold0"), rgb("--cold1")];
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    figure.values.forEach((row, r) => row.forEach((value, c) => {
      if (value === null) return;
      // Below linear: one crowded cell must not bleach the many small ones.
      const share = Math.max(0, Math.min(1, value / most)) ** (figure.percent || figure.warm ? 1 : 0.6);
      const at = 4 * (r * columns + c);
      for (let i = 0; i < 3; i += 1) pixels.data[at + i] = from[i] + share * (to[i] - from[i]);
      pixels.data[at + 3] = 255;
    }));
    context.putImageData(pixels, 0, 0);
    const wide = area.right - area.left, high = area.bottom - area.top;
    const place = { x: area.left, y: area.top, width: wide, height: high, preserveAspectRatio: "none" };
    const image = svg("image", { ...place, class: "mark", href: canvas.toDataURL() }, area.picture);
    image.style.imageRendering = "pixelated";
    const border = { x: area.left, y: area.top, width: wide, height: high, fill: "none", class: "rule" };
    svg("rect", border, area.picture);
    nameAxis(area, figure.rows, rows, area.top, area.bottom, true, false);
    nameAxis(area, figure.columns, columns, area.left, area.right, false, turned);
    const centre = { x: (area.left + area.right) / 2, y: area.height - 6, "text-anchor": "middle" };
    svg("text", centre, area.picture, figure.column_label);
    const side = `translate(11 ${(area.top + area.bottom) / 2}) rotate(-90)`;
    svg("text", { transform: side, "text-anchor": "middle" }, area.picture, figure.row_label);
    if (wide / columns > 34 && high / rows > 15) {
      figure.values.forEach((row, r) => row.forEach((value, c) => {
        if (value === null) return;
        const strong = value / most > (figure.percent || figure.warm ? 0.5 : 0.32);
        const at = { x: area.left + ((c + 0.5) * wide) / columns, y: area.top + ((r + 0.5) * high) / rows + 4 };
        const tint = `rgb(${(strong ? from : to).join(" ")})`;
        const text = figure.percent ? `${Math.round(100 * value)}` : String(Number(value.toPrecision(2)));
        svg("text", { ...at, class: "cell", "text-anchor": "middle", style: `fill:${tint}` }, area.picture, text);
      }));
    }
    follow(plot, area, (at, over, hint) => {
      const c = Math.floor(((at - area.left) / wide) * columns), r = Math.floor(((over - area.top) / high) * rows);
      const value = (figure.values[r] || [])[c];
      if (value === undefined || value === null) { hint.hide(); return; }
      const row = figure.rows.length ? `${figure.row_label} ${figure.rows[r]}, ` : "";
      const where = `${row}${figure.column_label} ${figure.columns[c]}`;
      hint.show([[where, null, true], [number(value, figure.percent), null]], at, over);
    });
  }

  function drawBars(plot, figure) {
    const turned = Math.max(...figure.names.map((name) => name.length)) > 3;
    const area = frame(plot, figure, 270, 52, turned ? 24 + 0.77 * roomFor(figure.names) : 42);
    const most = Math.max(...figure.series.flatMap(([, values]) => values), 1);
    const y = verticalAxis(area, 0, most * 1.05, false, figure.label);
    const group = (area.right - area.left) / figure.names.length, bar = (group * 0.8) / figure.series.length;
    figure.series.forEach(([name, values], s) => values.forEach((value, i) => {
      const shape = { x: area.left + (i + 0.1) * group + s * bar, width: Math.max(0.5, bar - 1), class: "mark" };
      const high = { y: y(value), height: area.bottom - y(value) };
      const one = svg("rect", { ...shape, ...high, fill: colour(s) }, area.picture);
      svg("title", {}, one, `${figure.names[i]}, ${name}: ${value}`);
    }));
    svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, area.picture);
    nameAxis(area, figure.names, figure.names.length, area.left, area.right, false, turned);
    const centre = { x: (area.left + area.right) / 2, y: area.height - 6, "text-anchor": "middle" };
    svg("text", centre, area.picture, figure.column_label);
    key(plot, figure.series.map(([name], s) => [name, colour(s)]));
  }

  function drawSpans(plot, figure) {
    const rows = figure.rows.length;
    const area = frame(plot, figure, Math.max(90, Math.min(rows * 18, 640)) + 54, 14 + roomFor(figure.rows), 42);
    const latest = Math.max(...figure.spans.map((span) => span[2]));
    const x = horizontalAxis(area, 0, latest, figure.label, false);
    const step = (area.bottom - area.top) / rows;
    nameAxis(area, figure.rows, rows, area.top, area.bottom, true, false);
    for (const [row, from, to, used] of figure.spans) {
      const shape = { x: x(from), y: area.top + row * step + step * 0.15, height: step * 0.7, rx: 1.5, class: "mark" };
      const look = { width: Math.max(1, x(to) - x(from) - 0.5), fill: colour(0), "fill-opacity": used ? 1 : 0.3 };
      const one = svg("rect", { ...shape, ...look }, area.picture);
      svg("title", {}, one, `${figure.rows[row]}: ${number(from)} to ${number(to)}${used ? "" : ", not used"}`);
    }
  }

  function drawPicture(plot, figure) {
    html("img", { src: `data:image/png;base64,${figure.png}`, alt: figure.title, class: "mark" }, plot);
  }
  function key(plot, entries) {
    const line = html("div", { class: "key" }, plot);
    for (const [name, tint] of entries) {
      const one = html("span", {}, line);
      html("i", { style: `background:${tint}` }, one);
      one.append(name);
    }
  }

  const DRAW = { lines: drawLines, heat: drawHeat, bars: drawBars, spans: drawSpans, picture: drawPicture };
  const known = new Set(report.groups.map((group) => group.label));

  function add(figure, parent) {
    const wide = figure.kind === "spans" || (figure.kind === "heat" && figure.values[0].length > 40);
    const outer = html("figure", { id: figure.id, class: wide ? "wide" : "" }, parent);
    const head = html("div", { class: "head" }, outer);
    html("figcaption", {}, head, figure.title);
    const state = { view: 0 };
    const plot = html("div", { class: "plot" });
    const draw = () => {
      if (!plot.clientWidth) return; // folded away: drawn when it is opened
      plot.replaceChildren();
      DRAW[figure.kind](plot, figure, state);
      const own = (figure.views || [{ series: [] }])[state.view].series.filter((one) => !known.has(one.name));
      if (own.length) key(plot, own.map((one) => [one.name, colour(one.style)]));
    };
    if ((figure.views || []).length > 1) {
      const axes = html("div", { class: "axes", role: "group", "aria-label": "horizontal axis" }, head);
      figure.views.forEach((view, i) => {
        const button = html("button", { type: "button", "aria-pressed": String(i === 0) }, axes, view.name);
        button.addEventListener("click", () => {
          state.view = i;
          [...axes.children].forEach((one, j) => one.setAttribute("aria-pressed", String(i === j)));
          draw();
        });
      });
    }
    outer.append(plot);
    if (figure.note) html("p", {}, outer, figure.note);
    redraws.push(draw);
    let seen = 0;
    new ResizeObserver(() => {
      if (plot.clientWidth !== seen) {
        seen = plot.clientWidth;
        draw();
      }
    }).observe(plot);
  }

  function chips() {
    const row = document.getElementById("chips");
    if (report.groups.length < 2) { row.remove(); return; }
    report.groups.forEach((group, style) => {
      const button = html("button", { type: "button", "aria-pressed": "true" }, row);
      const sample = svg("svg", { width: 24, height: 8, "aria-hidden": "true" }, button);
      const stroke = { stroke: colour(style), "stroke-dasharray": dash(style), "stroke-width": 3 };
      svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, ...stroke }, sample);
      button.append(group.label);
      button.addEventListener("click", () => {
        if (!hidden.delete(group.label)) hidden.add(group.label);
        button.setAttribute("aria-pressed", String(!hidden.has(group.label)));
        redraws.forEach((draw) => draw());
      });
    });
  }
  function theme() {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)");
    const button = document.getElementById("theme");
    const apply = (name) => {
      root.dataset.theme = name;
      button.textContent = name === "dark" ? "light" : "dark";
      redraws.forEach((draw) => draw());
    };
    button.addEventListener("click", () => apply(root.dataset.theme === "dark" ? "light" : "dark"));
    system.addEventListener("change", () => apply(system.matches ? "dark" : "light"));
    apply(system.matches ? "dark" : "light");
  }
  function copying() {
    for (const button of document.querySelectorAll("button.copy")) {
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.previousElementSibling.textContent);
        button.textContent = "copied";
      });
    }
  }

  theme();
  chips();
  copying();
  for (const [place, figures] of Object.entries(report.figures)) {
    for (const figure of figures) add(figure, document.getElementById(place));
  }
  const dealt = document.getElementById("partitions");
  if (!dealt.children.length) dealt.previousElementSibling.remove(); // nothing to head
})();
