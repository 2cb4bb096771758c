// Builds the page from its data. Every figure is drawn for its width, and again when its width changes.
const report = JSON.parse(document.getElementById("report").textContent);
const configurationNames = new Set(report.groups.map((group) => group.label));
const hiddenNames = new Set();
const redrawFunctions = [];
const redrawAll = () => redrawFunctions.forEach((redraw) => redraw());

const CHARTS = {
  "line-chart": (plot, figure, view) => {
    drawLineChart(plot, figure, view, hiddenNames);
    // The buttons at the top are the legend of curves that are configurations; on paper they may be on another page.
    const printing = document.documentElement.classList.contains("printing");
    const isExplained = (curve) => configurationNames.has(curve.name) && (!printing || report.groups.length < 2);
    const shown = view.curves.filter((curve) => !isExplained(curve) && !hiddenNames.has(curve.name));
    drawLegend(plot, shown.map((curve) => [curve.name, colourOf(curve.style), dashesOf(curve.style)]));
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
      fillValues();
    });
  }
  element.append(plot);
  const fillValues = addValues(element, figure, () => view);
  if (figure.note) html("p", {}, element, figure.note);
  redrawFunctions.push(draw);
  let drawnWidth = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth === drawnWidth) return;
    drawnWidth = plot.clientWidth;
    draw();
  }).observe(plot);
}
// A table of what the figure shows, for reading, copying, and screen readers; made when it is opened. Returns what makes it anew.
function addValues(element, figure, currentView) {
  const tableOf = TABLES[figure.kind];
  if (!tableOf) return () => {};
  const details = html("details", { class: "values" }, element);
  html("summary", {}, details, "values");
  const scroll = html("div", { class: "scroll", tabindex: "0", role: "region" }, details);
  scroll.setAttribute("aria-label", `values of ${figure.title}`);
  const fill = () => {
    if (!details.open) return;
    const [headings, ...rows] = tableOf(figure, currentView());
    scroll.replaceChildren();
    const table = html("table", {}, scroll);
    const head = html("tr", {}, html("thead", {}, table));
    headings.forEach((text) => html("th", { scope: "col" }, head, text));
    const body = html("tbody", {}, table);
    for (const [name, ...cells] of rows) {
      const line = html("tr", {}, body);
      html("th", { scope: "row" }, line, name);
      cells.forEach((text) => html("td", {}, line, text));
    }
  };
  details.addEventListener("toggle", fill);
  return fill;
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
    drawSample(button, colourOf(style), dashesOf(style));
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
  const tables = [...document.querySelectorAll("main > .scroll > table")];
  let theme = null;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    root.classList.add("printing");
    // Whole tables on the paper, however many columns they have.
    for (const table of tables) table.style.zoom = Math.min(1, table.parentElement.clientWidth / table.scrollWidth);
    redrawAll();
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = theme;
    root.classList.remove("printing");
    for (const table of tables) table.style.zoom = "";
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
