// Draws figures with uPlot, in the style sheet's colours: light or dark, at the window's width. The report and the live page share it.
"use strict";

const FONT = "11.5px system-ui, sans-serif";
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));

function tick(value, step) {
  if (!value) return value === 0 ? "0" : "";  // null: no room for this one
  if (step < 1e-4) {
    const exponent = Math.floor(Math.log10(step)), isHalf = (step / 10 ** exponent) % 1 > 0.1;
    return value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - exponent + isHalf));
  }
  const [size, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => step >= size) || [1, ""];
  const decimals = (String(+(step / size).toPrecision(3)).split(".")[1] || "").length;
  return (value / size).toFixed(decimals) + letter;
}

function series(line) {
  const stroke = () => colour(line.colour) + (line.style === "faint" ? "60" : "");
  const points = { show: line.style === "dots" || line.x.length <= 24, size: line.says.length ? 6 : 4.5, stroke, fill: stroke };
  const options = { stroke, points, width: line.style === "faint" ? 1.2 : 1.8, spanGaps: true };
  if (line.style === "rule") return { ...options, width: 1.2, dash: [5, 4], points: { show: false } };
  if (line.style === "dots") return { ...options, paths: () => null };
  if (line.style === "bars") return { ...options, points: { show: false }, fill: stroke, paths: uPlot.paths.bars({ size: [0.72, 64] }) };
  return options;
}

function nearest(u, at, where) {
  const values = u.data[at];
  for (let away = 0; away < values.length; away++) for (const each of [where - away, where + away]) if (values[each] != null) return each;
  return where;
}

// Draws a figure into a box, and returns a function that takes the same figure with other numbers.
function drawFigure(box, figure) {
  const bars = figure.names;
  let lines, data, says;
  function take(figure) {
    lines = figure.lines;
    data = lines.length > 1 ? uPlot.join(lines.map((line) => [line.x, line.y])) : [lines[0].x, lines[0].y];
    says = lines.map((line) => new Map(line.says.map((words, at) => [line.x[at], words])));
  }
  take(figure);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;

  function showTip(u) {
    tip.hidden = u.cursor.idx == null;
    if (tip.hidden) return;
    const rows = lines.map((line, at) => {
      const where = u.cursor.idxs[at + 1], words = says[at].get(u.data[0][where]);
      return line.style === "rule" ? line.name : [line.name, words || number(u.data[at + 1][where])].filter(Boolean).join(": ");
    });
    const x = u.data[0][u.cursor.idx];
    tip.textContent = [bars.length ? `${figure.x}: ${bars[x]}` : `${number(x)} ${figure.x}`, ...rows].join("\n");
    if (figure.whole) tip.textContent = tip.textContent.replace(/^(\S+) step/, "step $1");
    const left = u.cursor.left > u.over.clientWidth / 2 ? u.cursor.left - tip.offsetWidth - 12 : u.cursor.left + 12;
    tip.style.left = Math.max(-40, left) + "px";
    tip.style.top = Math.min(u.cursor.top, u.over.clientHeight - 20) + "px";
  }

  function writeAboveBars(u) {
    const pitch = u.bbox.width / bars.length;
    if (pitch / devicePixelRatio < 44) return;
    u.ctx.fillStyle = colour("soft");
    u.ctx.font = FONT.replace("11.5", 11.5 * devicePixelRatio);
    u.ctx.textAlign = "center";
    u.ctx.textBaseline = "bottom";
    lines[0].says.forEach((words, at) => u.ctx.fillText(words, u.valToPos(at, "x", true), u.valToPos(lines[0].y[at], "y", true) - 3));
  }

  const size = () => ({ width: box.clientWidth, height: box.closest(".small") ? 130 : 190 });
  const written = (u, values, at, space, step) => values.map((value) => tick(value, step));
  const shortNames = () => bars.map((name, at) => (bars.length * 30 < box.clientWidth - 60 || at % 3 === 0 ? name : ""));
  const axis = { stroke: () => colour("soft"), font: FONT };
  const xAxis = {
    ...axis, size: 24, gap: 4, space: 56, values: bars.length ? shortNames : written,
    grid: { show: false }, ticks: { stroke: () => colour("line"), size: 4, width: 1 }, border: { show: true, stroke: () => colour("line"), width: 1 },
    ...(bars.length && { splits: () => bars.map((_, at) => at) }), ...(figure.whole && { incrs: WHOLE }),
  };
  const yAxis = {
    ...axis, gap: 6, size: (u, values) => Math.max(52, 14 + 6.5 * Math.max(0, ...(values || []).map((words) => words.length))),
    space: box.closest(".small") ? 24 : 34, grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false },
    values: figure.log ? (u, values) => values.map((value) => (value === null ? "" : number(value))) : written,
  };
  const xRange = (u, low, high) => {
    const first = data[0][0], last = data[0].at(-1), from = Math.min(figure.from ?? first, first);
    if (bars.length) return [-0.5, bars.length - 0.5];
    if (from === last) return [from - 1, from + 1];
    return low <= first && high >= last ? [from, last] : [low, high];  // the whole, or the stretch that was dragged over
  };
  const room = { pad: bars.length ? 0.15 : 0.06, soft: 0, mode: figure.zero ? 1 : 0 };  // mode 1: zero belongs to the scale
  const yRange = (u, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, { min: room, max: room }));
  const plot = new uPlot({
    ...size(), padding: [8, 14, 0, 0], legend: { show: false }, pxAlign: 0,
    series: [{}, ...lines.map(series)],
    scales: { x: { time: false, range: xRange }, y: figure.log ? { distr: 3 } : { range: yRange } },
    axes: [xAxis, yAxis],
    cursor: { y: false, drag: { x: !bars.length, y: false }, dataIdx: nearest, points: { size: 7 } },
    hooks: { setCursor: [showTip], draw: bars.length ? [writeAboveBars] : [] },
  }, data, box);
  plot.over.append(tip);
  box.classList.add("drawn");
  new ResizeObserver(() => box.clientWidth !== plot.width && plot.setSize(size())).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false));
  return (figure) => { take(figure); plot.setData(data); };
}

document.querySelectorAll(".plot > script").forEach((numbers) => drawFigure(numbers.parentElement, JSON.parse(numbers.textContent)));
