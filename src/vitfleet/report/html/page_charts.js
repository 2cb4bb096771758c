// One function per kind of figure: each draws the data of a figure into an element.
const MAX_MARKED_POINTS = 12;

function linePath(xs, ys, x, y) {
  let text = "", penDown = false;
  xs.forEach((value, i) => {
    if (ys[i] === null) { penDown = false; return; }
    text += `${penDown ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    penDown = true;
  });
  return text;
}
function bandPath(curve, clip, x, y) {
  const low = linePath(curve.x, clip(curve.low), x, y);
  const high = linePath([...curve.x].reverse(), clip([...curve.high].reverse()), x, y);
  return `${low}${high.replace("M", "L")}Z`;
}
function drawCurve(area, curve, x, y) {
  const stroke = { stroke: colourOf(curve.style), "stroke-dasharray": dashesOf(curve.style), "stroke-width": 2 };
  const line = { fill: "none", "stroke-linejoin": "round", class: "mark", d: linePath(curve.x, curve.y, x, y) };
  svg("path", { ...line, ...stroke }, area.canvas);
  if (curve.x.length > MAX_MARKED_POINTS) return;
  curve.x.forEach((value, i) => {
    if (curve.y[i] === null) return;
    svg("circle", { cx: x(value), cy: y(curve.y[i]), r: 3, fill: colourOf(curve.style) }, area.canvas);
  });
}
function drawLineChart(plot, figure, view, hiddenNames) {
  const curves = view.curves.filter((curve) => !hiddenNames.has(curve.name));
  const printing = document.documentElement.classList.contains("printing"); // low enough for three rows on a page
  const height = printing ? 190 : plot.clientWidth < 480 ? 260 : 320;
  const area = createArea(plot, figure, height, 52, 42, figure.percent ? 12 : LABELLED_TOP);
  const ys = curves.flatMap((curve) => [...curve.y, ...curve.low, ...curve.high]).filter((value) => value !== null);
  const xs = curves.flatMap((curve) => curve.x);
  const largest = Math.max(...ys, 0) || 1;
  const high = figure.percent ? Math.min(1, largest * 1.05) : largest * 1.05;
  const low = Math.min(figure.floor, ...curves.flatMap((curve) => curve.y));
  const y = drawVerticalAxis(area, low, high, figure.percent, figure.label);
  const counted = view.name === "rounds" || view.name === "tasks"; // integers from 1
  const first = counted ? 1 : 0;
  const x = drawHorizontalAxis(area, first, Math.max(...xs, first + 1), view.label, counted);
  // A band can reach beyond the possible values, such as above 100 %.
  const clip = (values) => values.map((value) => Math.max(low, Math.min(high, value)));
  for (const curve of curves) {
    if (!curve.low.length) continue;
    const look = { fill: colourOf(curve.style), "fill-opacity": 0.14, class: "band" };
    svg("path", { d: bandPath(curve, clip, x, y), ...look }, area.canvas);
  }
  for (const curve of curves) drawCurve(area, curve, x, y);
  const places = [...new Set(xs)].sort((a, b) => a - b);
  const placeOf = (column) => [x(places[column]), area.top + 10];
  onReading(plot, area, places.length, 1, placeOf, (pointerX, pointerY, tooltip, guide) => {
    if (!xs.length) return;
    const distance = (value) => Math.abs(x(value) - pointerX);
    const nearest = xs.reduce((best, value) => (distance(value) < distance(best) ? value : best));
    guide.setAttribute("x1", x(nearest));
    guide.setAttribute("x2", x(nearest));
    guide.setAttribute("visibility", "visible");
    const rows = curves
      .map((curve) => [curve, lastValueAt(curve, nearest)])
      .filter(([, value]) => value !== null)
      .sort((a, b) => b[1] - a[1])
      .map(([curve, value]) => [`${curve.name}  ${formatNumber(value, figure.percent)}`, colourOf(curve.style)]);
    tooltip.show(`${view.label} ${formatNumber(nearest, false)}`, rows, x(nearest), pointerY);
  });
}
// The last value at or before x: on axes other than rounds, every curve has points of its own.
function lastValueAt(curve, x) {
  let i = curve.x.length - 1;
  while (i >= 0 && curve.x[i] > x + 1e-9) i -= 1;
  return i < 0 ? null : curve.y[i];
}

function channelsOf(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim().split(/\s+/).map(Number);
}
// One pixel per cell, scaled up by the browser: quick for large tables.
function shadeImage(values, columns, shadeOf, low, high) {
  const canvas = html("canvas", { width: columns, height: values.length });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, values.length);
  values.forEach((row, r) => row.forEach((value, c) => {
    if (value === null) return;
    const offset = 4 * (r * columns + c);
    for (let i = 0; i < 3; i += 1) pixels.data[offset + i] = low[i] + shadeOf(value) * (high[i] - low[i]);
    pixels.data[offset + 3] = 255;
  }));
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL();
}
function drawHeatMap(plot, figure) {
  const rows = figure.values.length, columns = Math.max(...figure.values.map((row) => row.length));
  const rotated = longest(figure.columns) > 4;
  const bottom = rotated ? 24 + 0.77 * labelWidth(figure.columns) : 42;
  const height = Math.max(110, Math.min(rows > 60 ? 380 : 30 * rows, 560)) + bottom + 12;
  const area = createArea(plot, figure, height, 26 + labelWidth(figure.rows), bottom);
  const known = figure.values.flat().filter((value) => value !== null);
  const largest = figure.percent ? 1 : Math.max(...known, 1e-12);
  const shadeOf = (value) => Math.max(0, Math.min(1, value / largest)) ** figure.shade_exponent;
  const low = channelsOf(`--${figure.palette}-low`), high = channelsOf(`--${figure.palette}-high`);
  const box = { x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top };
  const shades = shadeImage(figure.values, columns, shadeOf, low, high);
  const image = svg("image", { ...box, preserveAspectRatio: "none", class: "mark", href: shades }, area.canvas);
  image.style.imageRendering = "pixelated";
  svg("rect", { ...box, fill: "none", class: "rule" }, area.canvas);
  drawLabels(area, figure.rows, rows, area.top, area.bottom, "down");
  drawLabels(area, figure.columns, columns, area.left, area.right, rotated ? "rotated" : "across");
  drawHorizontalLabel(area, area.height - 6, figure.column_label);
  const side = `translate(11 ${(area.top + area.bottom) / 2}) rotate(-90)`;
  svg("text", { transform: side, "text-anchor": "middle" }, area.canvas, figure.row_label);
  const cell = { width: box.width / columns, height: box.height / rows };
  if (cell.width > 34 && cell.height > 15) {
    figure.values.forEach((row, r) => row.forEach((value, c) => {
      if (value === null) return;
      const centre = { x: area.left + (c + 0.5) * cell.width, y: area.top + (r + 0.5) * cell.height + 4 };
      const style = `fill:rgb(${(shadeOf(value) > 0.5 ? low : high).join(" ")})`;
      const text = figure.percent ? `${Math.round(100 * value)}` : String(Number(value.toPrecision(2)));
      svg("text", { ...centre, class: "cell", "text-anchor": "middle", style }, area.canvas, text);
    }));
  }
  const centreOf = (column, row) => [area.left + (column + 0.5) * cell.width, area.top + (row + 0.5) * cell.height];
  onReading(plot, area, columns, rows, centreOf, (x, y, tooltip) => {
    const c = Math.floor((x - area.left) / cell.width), r = Math.floor((y - area.top) / cell.height);
    const value = (figure.values[r] || [])[c];
    if (value === undefined) { tooltip.hide(); return; }
    const row = figure.rows.length ? `${figure.row_label} ${figure.rows[r]}, ` : "";
    const title = `${row}${figure.column_label} ${figure.columns[c]}`;
    const text = value === null ? "no value" : formatNumber(value, figure.percent);
    tooltip.show(title, [[text, null]], x, y);
  });
}

function drawBarChart(plot, figure) {
  const count = figure.categories.length;
  const rotated = longest(figure.categories) > 3;
  const area = createArea(plot, figure, 270, 52, rotated ? 24 + 0.77 * labelWidth(figure.categories) : 42, LABELLED_TOP);
  const largest = Math.max(...figure.series.flatMap(([, values]) => values), 1);
  const y = drawVerticalAxis(area, 0, largest * 1.05, false, figure.label);
  const group = (area.right - area.left) / count, width = (group * 0.8) / figure.series.length;
  figure.series.forEach(([, values], s) => values.forEach((value, i) => {
    const across = { x: area.left + (i + 0.1) * group + s * width, width: Math.max(0.5, width - 1) };
    const down = { y: y(value), height: area.bottom - y(value) };
    svg("rect", { ...across, ...down, class: "mark", fill: colourOf(s) }, area.canvas);
  }));
  svg("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, area.canvas);
  drawLabels(area, figure.categories, count, area.left, area.right, rotated ? "rotated" : "across");
  drawHorizontalLabel(area, area.height - 6, figure.category_label);
  drawLegend(plot, figure.series.map(([name], s) => [name, colourOf(s)]));
  const placeOf = (column) => [area.left + (column + 0.5) * group, area.top + 10];
  onReading(plot, area, count, 1, placeOf, (pointerX, pointerY, tooltip) => {
    const i = Math.floor((pointerX - area.left) / group);
    if (i < 0 || i >= count) { tooltip.hide(); return; }
    const lines = figure.series.map(([name, values], s) => [`${name}  ${formatNumber(values[i], false)}`, colourOf(s)]);
    tooltip.show(`${figure.category_label} ${figure.categories[i]}`, lines, pointerX, pointerY);
  });
}

function drawTimeline(plot, figure) {
  const rows = figure.rows.length;
  const area = createArea(plot, figure, Math.max(90, Math.min(rows * 18, 640)) + 54, 14 + labelWidth(figure.rows), 42);
  const x = drawHorizontalAxis(area, 0, Math.max(...figure.intervals.map(([, , end]) => end)), figure.label, false);
  const step = (area.bottom - area.top) / rows;
  drawLabels(area, figure.rows, rows, area.top, area.bottom, "down");
  for (const [row, start, end, used] of figure.intervals) {
    const down = { y: area.top + (row + 0.15) * step, height: step * 0.7, rx: 1.5 };
    const across = { x: x(start), width: Math.max(1, x(end) - x(start) - 0.5) };
    const look = { fill: colourOf(0), "fill-opacity": used ? 1 : 0.3, class: "mark" };
    svg("rect", { ...across, ...down, ...look }, area.canvas);
  }
  const ordered = [...figure.intervals].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const placeOf = (index) => {
    const [row, start, end] = ordered[index];
    return [x((start + end) / 2), area.top + (row + 0.5) * step];
  };
  onReading(plot, area, ordered.length, 1, placeOf, (pointerX, pointerY, tooltip) => {
    const row = Math.floor((pointerY - area.top) / step);
    const found = ordered.find(([r, start, end]) => r === row && x(start) <= pointerX && pointerX <= x(end));
    if (!found) { tooltip.hide(); return; }
    const [, start, end, used] = found;
    const times = `${formatNumber(start)} to ${formatNumber(end)} ${figure.label}${used ? "" : ", not used"}`;
    tooltip.show(figure.rows[row], [[times, null]], pointerX, pointerY);
  });
}

function drawImage(plot, figure) {
  html("img", { src: `data:image/png;base64,${figure.png}`, alt: figure.title, class: "mark" }, plot);
}
