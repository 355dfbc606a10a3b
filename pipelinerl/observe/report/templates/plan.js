// The page of a plan: reads the sliders, has `evaluate` (made from the planner's own formulas, and standing before this script) compute, and shows.
"use strict";

const PLAN = JSON.parse(document.getElementById("plan").textContent);
const form = document.getElementById("inputs");
const sliders = [...form.querySelectorAll("input[type=range]")];
const pick = (id) => document.getElementById(id);
const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3)));

function count(value) {
  const [size, letter] = [[1e12, " T"], [1e9, " B"], [1e6, " M"]].find(([size]) => Math.abs(value) >= (size > 1e6 ? size : 10 * size)) || [1, ""];
  return short(value / size) + letter;
}

function seconds(value) {
  if (value < 1) return short(1000 * value) + " ms";
  if (value < 60) return value.toFixed(1) + " s";
  const whole = Math.round(value), two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function say(value, unit) {
  if (!Number.isFinite(value)) return "–";
  if (unit === "s") return seconds(value);
  if (unit !== "B" && unit !== "B/s") return `${count(value)} ${unit}`.trim();
  const [size, name] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => Math.abs(value) >= size) || [1, "B"];
  return `${short(value / size)} ${name}${unit.slice(1)}`;
}

let base = {};

function valueOf(slider) {
  return slider.dataset.steps ? JSON.parse(slider.dataset.steps)[slider.value] : +slider.value;
}

function read() {
  const inputs = { ...base, ...PLAN.models[pick("model").value], ...PLAN.gpus[pick("gpu").value] };
  if (pick("model").value === PLAN.model) ["trained_parameters", "policy_parameters"].forEach((name) => (inputs[name] = base[name]));
  else inputs.trained_parameters = inputs.policy_parameters = inputs.parameters;
  for (const slider of sliders) if (slider.dataset.moved) inputs[slider.name] = valueOf(slider);
  inputs.context_tokens = Math.max(base.context_tokens, inputs.prompt_tokens + inputs.max_tokens);
  return inputs;
}

// Engines take the GPUs that a number of trainer ranks leaves; a trainer that was sharded over all its replicas stays so.
function sweep(inputs, total) {
  const unit = inputs.context * inputs.tensor * inputs.pipeline, engine = inputs.engine_tensor * inputs.engine_pipeline;
  const x = [], lines = { generated_rate: [], trained_rate: [], run_rate: [] };
  for (let ranks = unit; ranks <= total - engine; ranks += unit) {
    const shard = inputs.shard > 1 ? ranks / unit : 1;
    const v = evaluate({ ...inputs, ranks, shard, engines: Math.floor((total - ranks) / engine) });
    x.push(ranks);
    Object.keys(lines).forEach((name) => lines[name].push(v[name]));
  }
  const colours = { generated_rate: "engine", trained_rate: "train", run_rate: "score" };
  const names = { generated_rate: "R, written", trained_rate: "T, trained", run_rate: "the run" };
  return {
    x: "GPUs for the trainer", from: null, zero: true, log: false, names: [], whole: false,
    lines: Object.keys(lines).map((name) => ({ name: names[name], colour: colours[name], style: "line", x, y: lines[name], says: [] })),
  };
}

function problems(v) {
  const found = [];
  if (v.used_gpus > PLAN.num_gpus) found.push(`it takes ${short(v.used_gpus)} GPUs of ${PLAN.num_gpus}`);
  if (v.trainer_rank_room < 0) found.push(`a trainer rank lacks ${say(-v.trainer_rank_room, "B")}`);
  if (v.engine_rank_room < 0) found.push("an engine's KV cache does not hold one sequence of the longest length");
  if (v.ranks % (v.context * v.tensor * v.pipeline) || v.replicas % v.shard) found.push("the trainer's ranks cannot be divided so");
  return found;
}

let redraw = null, drawn = "";

function show() {
  const inputs = read(), v = evaluate(inputs), found = problems(v);
  for (const slider of sliders) pick("o-" + slider.name).textContent = say(inputs[slider.name], { B: "B", "B/s": "B/s", s: "s" }[PLAN.inputs[slider.name].unit] || "");
  for (const element of document.querySelectorAll("[data-figure]")) {
    const name = element.dataset.figure, unit = (PLAN.rows[name] || PLAN.inputs[name]).unit;
    element.textContent = say(v[name], unit);
  }
  pick("verdict").textContent = found.length ? `Does not fit: ${found.join("; ")}.` : `${seconds(v.step_s)} a step, ${short(v.run_rate)} tokens/s, ${short(v.used_gpus)} of ${PLAN.num_gpus} GPUs; the trainer waits for ${short(100 * v.trainer_idle)} % of the time, engines for ${short(100 * v.engines_idle)} %.`;
  pick("verdict").className = "verdict " + (found.length ? "bad" : "good");
  for (const stack of document.querySelectorAll(".stack")) {
    const names = stack.dataset.parts.split(" "), all = names.reduce((sum, name) => sum + v[name], 0);
    stack.classList.toggle("over", all > v.gpu_bytes);
    stack.replaceChildren(...names.map((name, at) => {
      const part = document.createElement("i");
      part.className = "p" + at;
      part.style.setProperty("width", `${(100 * v[name]) / Math.max(all, v.gpu_bytes)}%`);
      part.title = `${name}: ${say(v[name], "B")}`;
      return part;
    }));
  }
  for (const row of document.querySelectorAll("[data-part]")) row.hidden = !v[row.dataset.part];
  for (const row of document.querySelectorAll("[data-transport]")) row.classList.toggle("chosen", +row.dataset.transport === v.chosen_transport);
  const moved = Object.keys(PLAN.inputs).filter((name) => sliders.some((slider) => slider.name === name && !slider.dataset.steps && !name.startsWith("is_")));
  const effects = moved.map((name) => [name, ...[0.9, 1.1].map((factor) => evaluate({ ...inputs, [name]: inputs[name] * factor }).step_s / v.step_s - 1)]);
  const largest = effects.sort((a, b) => Math.max(...b.slice(1).map(Math.abs)) - Math.max(...a.slice(1).map(Math.abs))).slice(0, 6);
  pick("sensitivity").replaceChildren(...largest.map(([name, low, high]) => {
    const row = document.createElement("tr");
    for (const words of [name, `${(100 * low).toFixed(1)} % / ${(100 * high).toFixed(1)} %`, PLAN.inputs[name].origin]) row.insertCell().textContent = words;
    return row;
  }));
  const figure = sweep(inputs, PLAN.num_gpus);
  if (!figure.lines[0].x.length) return;
  if (redraw) redraw(figure);
  else redraw = drawFigure(pick("sweep"), figure);
}

function start(name) {
  base = PLAN.placements[name];
  for (const slider of sliders) {
    const steps = slider.dataset.steps && JSON.parse(slider.dataset.steps), value = base[slider.name];
    delete slider.dataset.moved;
    if (!steps && value > +slider.max) slider.max = value;
    slider.value = steps ? Math.max(0, steps.findLastIndex((step) => step <= value)) : value;
  }
  show();
}

for (const [id, names, at] of [["model", Object.keys(PLAN.models), PLAN.model], ["gpu", Object.keys(PLAN.gpus), PLAN.gpu]]) {
  pick(id).append(...names.map((name) => new Option(name, name, name === at, name === at)));
}
for (const row of document.querySelectorAll("[data-part]")) {
  const at = [...row.parentElement.children].indexOf(row), swatch = document.createElement("i");
  swatch.className = "swatch p" + at;
  row.cells[0].prepend(swatch);
}
pick("placement").value = PLAN.chosen;
pick("placement").addEventListener("change", (event) => start(event.target.value));
form.addEventListener("input", (event) => {
  if (event.target.type === "range") event.target.dataset.moved = "1";
  if (event.target.id !== "placement") show();
});
form.addEventListener("reset", () => setTimeout(() => { pick("placement").value = PLAN.chosen; start(PLAN.chosen); }));
start(PLAN.chosen);
