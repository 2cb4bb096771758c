// The values of each kind of figure as rows of text; the first row has the headings.
const textOf = (value, percent) => (value === null || value === undefined ? "–" : formatNumber(value, percent));

const TABLES = {
  "line-chart": (figure, view) => {
    const places = [...new Set(view.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
    const cellOf = (curve, place) => {
      const i = curve.x.indexOf(place);
      if (i < 0) return "–";
      const deviation = curve.high.length ? ` ± ${textOf(curve.high[i] - curve.y[i], figure.percent)}` : "";
      return textOf(curve.y[i], figure.percent) + deviation;
    };
    return [
      [view.label, ...view.curves.map((curve) => curve.name)],
      ...places.map((place) => [formatNumber(place, false), ...view.curves.map((curve) => cellOf(curve, place))]),
    ];
  },
  "heat-map": (figure) => [
    [`${figure.row_label} / ${figure.column_label}`, ...figure.columns],
    ...figure.values.map((row, r) => [figure.rows[r] ?? String(r + 1), ...row.map((value) => textOf(value, figure.percent))]),
  ],
  "bar-chart": (figure) => [
    [figure.category_label, ...figure.series.map(([name]) => name)],
    ...figure.categories.map((name, i) => [name, ...figure.series.map(([, values]) => textOf(values[i], false))]),
  ],
  timeline: (figure) => [
    ["", `from, ${figure.label}`, `to, ${figure.label}`, "used"],
    ...figure.intervals.map(([row, start, end, used]) => [
      figure.rows[row], formatNumber(start), formatNumber(end), used ? "yes" : "no",
    ]),
  ],
};
