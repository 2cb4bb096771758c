// Builds the page from its data. Every figure is drawn for its width, and again when its width changes.
const report = JSON.parse(document.getElementById("report").textContent);
const configurationNames = new Set(report.groups.map((group) => group.label));
const hiddenNames = new Set();
const redrawFunctions = [];
const redrawAll = () => redrawFunctions.forEach((redraw) => redraw());

const CHARTS = {
  "line-chart": (plot, figure, view) => {
    drawLineChart(plot, figure, view, hiddenNames);
    // The buttons at the top are the legend of curves that are configurations.
    const others = view.curves.filter((curve) => !configurationNames.has(curve.name));
    if (others.length) drawLegend(plot, others.map((curve) => [curve.name, colourOf(curve.style)]));
  },
  "heat-map": drawHeatMap,
  "bar-chart": drawBarChart,
  timeline: drawTimeline,
  image: drawImage,
};

function addFigure(figure, section) {
  const wide = figure.kind === "timeline" || (figure.kind === "heat-map" && figure.values[0].length > 40);
  const element = html("figure", { id: figure.id, class: wide ? "wide" : "" }, section);
  const head = html("div", { class: "head" }, element);
  html("figcaption", {}, head, figure.title);
  const plot = html("div", { class: "plot" });
  const views = figure.views || [null];
  let view = views[0];
  const draw = () => {
    if (!plot.clientWidth) return; // in a closed section: drawn when it opens
    plot.replaceChildren();
    CHARTS[figure.kind](plot, figure, view);
  };
  if (views.length > 1) {
    addAxisButtons(head, views, (chosen) => {
      view = chosen;
      draw();
    });
  }
  element.append(plot);
  if (figure.note) html("p", {}, element, figure.note);
  redrawFunctions.push(draw);
  let drawnWidth = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth === drawnWidth) return;
    drawnWidth = plot.clientWidth;
    draw();
  }).observe(plot);
}
function addAxisButtons(head, views, choose) {
  const group = html("div", { class: "axes", role: "group", "aria-label": "horizontal axis" }, head);
  const buttons = views.map((view, i) => {
    const button = html("button", { type: "button", "aria-pressed": String(i === 0) }, group, view.name);
    button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      choose(view);
    });
    return button;
  });
}

function addConfigurationButtons() {
  const row = document.getElementById("chips");
  if (report.groups.length < 2) { row.remove(); return; }
  report.groups.forEach((group, style) => {
    const button = html("button", { type: "button", "aria-pressed": "true" }, row);
    const sample = svg("svg", { width: 24, height: 8, "aria-hidden": "true" }, button);
    const stroke = { stroke: colourOf(style), "stroke-dasharray": dashesOf(style), "stroke-width": 3 };
    svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, ...stroke }, sample);
    button.append(group.label);
    button.addEventListener("click", () => {
      if (!hiddenNames.delete(group.label)) hiddenNames.add(group.label);
      button.setAttribute("aria-pressed", String(!hiddenNames.has(group.label)));
      redrawAll();
    });
  });
}
function setUpTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const apply = (name) => {
    root.dataset.theme = name;
    button.textContent = name === "dark" ? "light" : "dark";
    redrawAll();
  };
  button.addEventListener("click", () => apply(root.dataset.theme === "dark" ? "light" : "dark"));
  system.addEventListener("change", () => apply(system.matches ? "dark" : "light"));
  apply(system.matches ? "dark" : "light");
}
// Paper is white and narrower than most windows: print in the light theme, drawn for the width of the paper.
function setUpPrinting() {
  const root = document.documentElement;
  let theme = null;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    root.classList.add("printing");
    redrawAll();
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = theme;
    root.classList.remove("printing");
    redrawAll();
  });
}
function setUpCopyButtons() {
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "copied";
    });
  }
}

setUpTheme();
addConfigurationButtons();
setUpPrinting();
setUpCopyButtons();
for (const [section, figures] of Object.entries(report.figures)) {
  for (const figure of figures) addFigure(figure, document.getElementById(section));
}
const partitions = document.getElementById("partitions");
if (!partitions.children.length) partitions.previousElementSibling.remove(); // a heading without figures
