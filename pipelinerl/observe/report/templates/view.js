// The live page: asks for the run's state once a second, and draws it.
"use strict";
const SVG = "http://www.w3.org/2000/svg", $ = id => document.getElementById(id);
const PLOTS = [
  ["Reward", "by step", "step", [["reward", "train", "training"], ["held_out", "score", "held-out, by version"]], false],
  ["Length of a sample", "tokens, by step", "step", [["length", "engine", ""]], true],
  ["Staleness", "versions, by step", "step", [["staleness_mean", "engine", "mean"], ["staleness_max", "bad", "oldest token"]], true],
  ["Tokens generated", "per second, over seconds", "s", [["generated", "engine", ""]], true],
  ["Sequences in engines", "over seconds", "s", [["running", "score", ""]], true],
  ["Pause of a swap", "ms, over seconds", "s", [["pause_ms", "warm", ""]], true],
  ["Truncated", "part of one, by step", "step", [["truncated", "bad", ""]], true],
  ["Engine against trainer", "|Δ log-probability|, mean, by step", "step", [["mismatch", "train", ""]], true],
  ["Entropy", "nats, by step", "step", [["entropy", "engine", ""]], false]];
const COLOURS = ["train", "score", "engine", "warm", "bad", "good", "soft", "ink"];
const BOX = 128, GAP = 72, WALL = 26, WIDE = 22, WIDER = 24;  // the last two: characters of a line in a stage, in a box below

function make(parent, tag, attributes, text) {
  const svg = parent.namespaceURI === SVG || tag === "svg";
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value && Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
}
const percent = value => value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`;
function duration(s) {
  if (s === null || s === undefined) return "–";
  s = Math.round(s);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
}
function hue(version) { return version < 0 ? null : (version * 137.508) % 360; }
function tint(node, version) { const at = hue(version); if (at !== null) node.style.background = `hsl(${at} 75% 55% / .33)`; }

function cards(parent, entries) {
  parent.replaceChildren();
  for (const [title, value, note] of entries) {
    const card = make(parent, "div");
    make(card, "span", {}, title); make(card, "b", {}, value); make(card, "span", {}, note || "");
  }
}
function header(s) {
  document.title = `${s.name}: pipelinerl`;
  $("name").textContent = s.name;
  const left = s.left_s ? `, ${duration(s.left_s)} left` : "";
  $("progress").textContent = `step ${s.steps_done} of ${s.steps ?? "?"}, version ${short(s.version)}, ${duration(s.elapsed_s)}${left}` + (s.ended ? ` — ended: ${s.ended}` : "");
  $("bar").firstChild.style.width = s.steps ? `${100 * Math.min(1, s.steps_done / s.steps)}%` : "0";
  const last = name => (s.curves[name].at(-1) || [0, null])[1], id = s.identity;
  cards($("cards"), [
    ["Reward", short(last("reward")), last("held_out") === null ? "" : `held-out ${short(last("held_out"))}`],
    ["Generated", `${short(s.generated_per_s)} tok/s`, `trained ${short(s.trained_per_s)} tok/s, useful ${short(s.useful_per_s)}`],
    ["Trainer waits", percent(s.trainer_waits), "of the last seconds"],
    ["Engines idle", percent(s.engines_idle), `${percent(s.slots_empty)} of slots empty, admission closed`],
    ["Staleness", short(last("staleness_mean")), `oldest token ${short(last("staleness_max"))} versions`],
    ["Last pause", s.last_pause_s === null ? "–" : `${short(1000 * s.last_pause_s)} ms`, "of an engine, by a swap"],
    ["Rollouts", short(id.admitted), s.imbalance === 0 ? `✓ ${short(id.in_flight)} in flight, ${short(id.trained)} trained` : `✗ off by ${s.imbalance}`]]);
}
// Stages and the queues between them, from left to right. [name, queue behind it]; "(" and ")" are the walls of prm, which stands around scoring.
function line(s) {
  const [hasPrm, hasGroupRewards] = ["generated", "group_scored"].map(queue => queue in s.queues);
  return [["prompts", "prompts"], ["generation", hasPrm ? "generated" : "trajectories"], ...(hasPrm ? [["(", "trajectories"]] : []), ["scoring", "scored"],
    ...(hasPrm ? [[")", "prm_scored"]] : []), ...(hasGroupRewards ? [["group_rewards", "group_scored"]] : []), ["batching", "rows"], ["training", null], ["trainer", null]];
}
// No label is cut: it goes on in the next line, and boxes are as high as the longest.
function wrap(text, width) {
  const lines = [""];
  for (const word of text.split(" ").flatMap(word => word.match(new RegExp(`.{1,${width}}`, "gu")) || [])) {
    if (lines.at(-1) && lines.at(-1).length + 1 + word.length > width) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) && " ") + word;
  }
  return lines;
}
function doing(s, name) {
  if (name === "trainer") return [`waits ${percent(s.trainer_waits)}`, `${short(s.trained_per_s)} tok/s`];
  const wait = s.waits.find(([wait]) => wait.startsWith(`${name}: `));
  if (s.ended) return [];
  if (wait) return [...wrap(`waits for ${wait[0].slice(name.length + 2)}`, WIDE), `${wait[1].toFixed(1)} s`];
  return s.idle.some(wait => wait.startsWith(`${name}: `)) ? ["idle: nothing to do"] : [];
}
function stages(s) {
  const parent = $("stages");
  parent.replaceChildren();
  for (const [name, behind] of line(s).filter(([name]) => !"()".includes(name))) {
    const row = make(parent, "div"), queue = s.queues[behind];
    make(row, "b", {}, name); make(row, "span", {}, doing(s, name).join(" "));
    if (queue) make(parent, "p", {}, `↓ ${short(queue.items)} ${behind}, ${percent(queue.fill)} full${queue.per_s === null ? "" : `, ${short(queue.per_s)}/s`}`);
  }
}
function flow(s) {
  const root = $("flow"), y = 34, at = {}, names = line(s);
  const high = 36 + 13 * Math.max(2, ...names.map(([name]) => doing(s, name).length)), low = y + high + (beside(s) ? 90 : 64);
  root.replaceChildren();
  let x = 12;
  for (const [name, queue] of names) {
    at[name] = x;
    x += "()".includes(name) ? WALL : stage(root, s, name, x, y, high);
    if (name !== "trainer") arrow(root, s.queues[queue], queue, x, y, high);
    x += GAP;
  }
  if ("(" in at) prmStage(root, at, y, high, s.waits.find(([wait]) => wait.startsWith("prm: ")), s.ended);
  const boxes = [[at.generation, `${s.engines.length} engine${s.engines.length === 1 ? "" : "s"}`, [`${short(s.engines.reduce((sum, e) => sum + (e.running || 0), 0))} sequences, ${short(s.generated_per_s)} tok/s`,
      `versions ${span(s.engines.map(e => e.version))}${kv(s.engines)}`]],
    [at.scoring, `${s.scorers.length} scorer${s.scorers.length === 1 ? "" : "s"}`, [`${short(s.scorers.reduce((sum, e) => sum + (e.scored || 0), 0))} scored`]],
    [at.trainer, "policy", [`version ${short(s.version)}`, s.last_pause_s === null ? "" : `pause ${short(1000 * s.last_pause_s)} ms`]]];
  if ("(" in at) {
    const prm = at.scoring + 172, stopped = s.prm.num_stopped ? `, ${short(s.prm.num_stopped)} stopped` : "";
    boxes.push([prm, "process reward model", [`${short(s.prm.num_steps)} steps${stopped}`, `${short(s.prm.num_waiting_tokens)} tokens wait`]]);
    make(root, "path", {class: "pipe", d: `M${prm} ${y + high + 22}V${low - 4}m-5 -6l5 6l5 -6M${prm + 20} ${low}V${y + high + 26}m-5 6l5 -6l5 6`});
  }
  const tall = 30 + 14 * Math.max(...boxes.map(([, , texts]) => texts.flatMap(text => wrap(text, WIDER)).length)), foot = low + tall;
  for (const [x, title, texts] of boxes) box(root, x, low, tall, title, texts.flatMap(text => wrap(text, WIDER)));
  root.setAttribute("viewBox", `0 0 ${x - GAP + 20} ${foot + 26}`);
  if (beside(s)) environment(root, beside(s), at, y, high, low);
  for (const name of ["generation", "scoring"]) make(root, "path", {class: "pipe", d: `M${at[name] + 50} ${y + high}V${low - 4}m-5 -6l5 6l5 -6M${at[name] + 78} ${low}V${y + high + 4}m-5 6l5 -6l5 6`});
  make(root, "path", {class: "pipe", d: `M${at.trainer + 64} ${y + high}V${low - 4}m-5 -6l5 6l5 -6`});
  make(root, "path", {class: "pipe", d: `M${at.trainer + 64} ${foot + 2}v14H${at.generation + 64}v-10m-5 6l5 -6l5 6`});
  make(root, "text", {class: "small", x: at.batching + 64, y: foot + 12, "text-anchor": "middle"}, "weight_sync: each engine stages and commits on its own");
}
function stage(root, s, name, x, y, high) {
  make(root, "rect", {class: "box", x, y, width: BOX, height: high});
  make(root, "text", {x: x + BOX / 2, y: y + 20, "text-anchor": "middle", "font-weight": 600}, name);
  const wait = s.waits.find(([wait]) => wait.startsWith(`${name}: `));
  doing(s, name).forEach((words, at) => {
    const text = make(root, "text", {class: "small", x: x + BOX / 2, y: y + 38 + 13 * at, "text-anchor": "middle"}, words);
    if (wait && wait[1] >= 5) text.style.fill = "var(--warm)";
  });
  return BOX;
}
function arrow(root, queue, name, x, y, high) {
  make(root, "path", {class: "pipe", d: `M${x + 3} ${y + 31}h${GAP - 10}m-6 -5l6 5l-6 5`});
  if (!queue) return;
  if (queue.per_s !== null) make(root, "text", {class: "small rate", x: x + GAP / 2 - 1, y: y + 20, "text-anchor": "middle"}, `${short(queue.per_s)}/s`);
  make(root, "rect", {class: "slot", x: x + 8, y: y + 40, width: GAP - 18, height: 6});
  const fill = Math.min(1, queue.fill ?? 0);
  make(root, "rect", {class: fill > .8 && name !== "prompts" ? "fill hot" : "fill", x: x + 8, y: y + 40, width: (GAP - 18) * fill, height: 6});
  make(root, "text", {class: "small", x: x + GAP / 2 - 1, y: y + high + 16, "text-anchor": "middle"}, `${short(queue.items)} ${name}`);
}
function prmStage(root, at, y, high, wait, ended) {
  const left = at["("], width = at[")"] + WALL - left;
  make(root, "rect", {class: "pipe", x: left, y: y - 26, width, height: high + 30, rx: 9});
  make(root, "text", {x: left + 12, y: y - 9, "font-weight": 600}, "prm");
  if (wait && !ended) make(root, "text", {class: "small", x: left + 88, y: y - 9}, `waits for ${wait[0].slice("prm: ".length)}, ${wait[1].toFixed(1)} s`);
}
// Beside generation: turns go down to the scorers, who run the environment, or out to agents, and what is replied comes back.
function beside(s) {
  if ("num_awaiting_reply" in s.environment) return ["environment", `${short(s.environment.num_awaiting_reply)} between turns`];
  return "num_open" in s.gateway ? ["agents", `${short(s.gateway.num_open)} episodes lent`] : null;
}
function environment(root, [title, words], at, y, high, low) {
  const middle = (at.generation + BOX + at.scoring) / 2, top = y + high + 26, text = (dy, words, css) => make(root, "text", {class: css, x: middle, y: top + dy, "text-anchor": "middle"}, words);
  make(root, "path", {class: "pipe", d: `M${at.generation + BOX - 24} ${y + high}L${middle - 40} ${top + 12}M${middle + 40} ${top + 36}L${at.scoring + 8} ${low}`});
  make(root, "rect", {class: "box", x: middle - 56, y: top, width: 112, height: 46});
  text(18, title, ""); text(35, words, "small");
}
function box(root, x, y, height, title, lines) {
  make(root, "rect", {class: "box", x: x - 14, y, width: 156, height});
  make(root, "text", {x: x + 64, y: y + 18, "text-anchor": "middle"}, title);
  lines.forEach((text, at) => make(root, "text", {class: "small", x: x + 64, y: y + 36 + 14 * at, "text-anchor": "middle"}, text));
}
function kv(engines) {
  const known = engines.map(e => e.kv).filter(v => v !== null && v !== undefined);
  return known.length ? `, KV ${percent(Math.max(...known))}` : "";
}
function span(values) {
  const known = values.filter(v => v !== null && v !== undefined);
  if (!known.length) return "–";
  const low = Math.min(...known), high = Math.max(...known);
  return low === high ? `${low}` : `${low} to ${high}`;
}
// Alarms of learning, failures of functions by cause, and by what reasons rollouts ended: nothing where all is well.
function troubles(s) {
  const parent = $("troubles"), text = (node, words) => node.append(words);
  parent.replaceChildren();
  for (const one of s.alarms) {
    const row = make(parent, "p", {class: one.over === null ? "trouble" : "trouble over"});
    make(row, "b", {}, `${one.name.replaceAll("_", " ")}`);
    text(row, ` since step ${short(one.began)}${one.over === null ? "" : `, over at step ${short(one.over)}`}: ${one.figure} `);
    if (one.over === null) make(row, "span", {class: "soft"}, one.change);
  }
  for (const one of s.function_errors) {
    const row = make(parent, "p", {class: "trouble"});
    make(row, "b", {}, one.function);
    text(row, ` (${one.kind}) failed ${short(one.count)}${one.num_calls === null ? "" : ` of ${short(one.num_calls)}`} times since step ${short(one.began)}: ${one.cause} `);
    make(row, "span", {class: "soft"}, one.where);
  }
  if (s.reasons.length) make(parent, "p", {class: "soft"}, "Rollouts that were not trained: " + s.reasons.map(([reason, count]) => `${short(count)} ${reason}`).join(" · "));
}
function waits(s) {
  const parent = $("waits"), lines = s.waits.map(([name, seconds]) => `${name} (${seconds.toFixed(1)} s)`), isOpen = Boolean(parent.querySelector("details")?.open);
  parent.replaceChildren();
  make(parent, "p", {}, s.ended ? "The run has ended; of its time, so much was waited:" : "Now: " + (lines.join(" · ") || "nobody waits."));
  for (const [name, part] of s.waited) waited(parent, name, part, "wait");
  if (!s.idled.length) return;
  const folded = make(parent, "details");
  folded.open = isOpen;
  make(folded, "summary", {}, `Idle: ${s.idled.length} stage${s.idled.length === 1 ? "" : "s"} quick enough to have had nothing to do, which is no sign of who is slow`);
  for (const [name, part] of s.idled) waited(folded, name, part, "wait idle");
}
function waited(parent, name, part, css) {
  const [stage, ...what] = name.split(": "), row = make(parent, "div", {class: css});
  make(row, "span", {}, `${stage} for ${what.join(": ")}`);
  make(make(row, "i"), "b").style.width = `${100 * Math.min(1, part)}%`;
  make(row, "span", {}, percent(part));
}
// Points of a curve as increasing columns: of a step that was undone and done again, the later one.
function curve(name, colour, points) {
  const rows = [...new Map(points)].sort((one, other) => one[0] - other[0]);
  return {name, colour, style: "line", x: rows.map(row => row[0]), y: rows.map(row => row[1]), says: []};
}
const drawn = new Map();  // by title: the names of the lines, the box, and how it takes new numbers
function plots(s) {
  const parts = [["Held-out, by component", "by version", "version", "held_out"], ["Reward, by component", "by step", "step", "training"]]
    .filter(([, , , of]) => Object.keys(s.components[of]).length > 1)
    .map(([title, unit, x, of]) => [title, unit, x, Object.entries(s.components[of]).map(([name, points], at) => curve(name, COLOURS[at % COLOURS.length], points)), false]);
  const curves = PLOTS.map(([title, unit, x, series, zero]) => [title, unit, x, series.map(([name, colour, label]) => curve(label, colour, s.curves[name] || [])), zero]);
  const ordered = [curves[0], ...parts, ...curves.slice(1)], before = $("plots").childElementCount;
  for (const [title, unit, x, series, zero] of ordered) {
    const lines = series.filter(line => line.x.length), names = JSON.stringify(lines.map(line => line.name));
    if (!lines.length) continue;
    const known = drawn.get(title), figure = {x, from: null, zero, log: false, names: [], whole: x === "step", lines};
    if (known && known.names === names) { if (!known.box.matches(":hover")) known.take(figure); continue; }  // a reader's stretch stays
    known?.box.parentElement.remove();
    const parent = make($("plots"), "figure"), caption = make(parent, "h3", {}, title + " ");
    make(caption, "span", {}, unit);
    for (const line of lines) if (line.name) make(caption, "span", {}, ` ● ${line.name}`).style.color = `var(--${line.colour})`;
    const box = make(parent, "div", {class: "plot", role: "img", "aria-label": title}); drawn.set(title, {names, box, take: drawFigure(box, figure)});
  }
  if ($("plots").childElementCount !== before) for (const [title] of ordered) if (drawn.has(title)) $("plots").append(drawn.get(title).box.parentElement);
}
function engines(s) {
  const changing = new Map((s.members || []).map(m => [m.name, m]));
  const serving = s.engines.map(e => [`engine ${e.id}, version ${short(e.version)}${changing.has(`engine ${e.id}`) ? `, ${changing.get(`engine ${e.id}`).state}` : ""}`, `${short(e.running)}${e.slots ? ` of ${e.slots}` : ""} sequences`, `${short(e.waiting)} queued, busy ${percent(e.busy)}${e.kv === null ? "" : `, KV cache ${percent(e.kv)}`}`]);
  for (const e of s.engines) changing.delete(`engine ${e.id}`);
  cards($("engines"), [...serving, ...[...changing.values()].map(m => [m.name, m.state, m.reason]), ...(s.trainer ? [["trainer", s.trainer, ""]] : []), ...(s.roles ? [["roles", s.roles, ""]] : [])]);
}
// Samples: asked for anew when the run has shown others, a filter changed or a page was turned; text that a reader may be selecting stays where it is.
// The filters stand in the address behind its #, so that a reload, or who is sent the address, has the same ones.
const asked = {offset: 0, limit: 12}, given = new URLSearchParams(location.hash.slice(1));
for (const [name, value] of given) if (name !== "status" && $("filter").elements[name]) $("filter").elements[name].value = value;
let shown = "", seen = -1, statuses = "";
function filter() {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of new FormData($("filter"))) {
    if (value !== "" && name !== "status") query.set(name, value);
    if (name === "status" && value !== "") { const [status, reason] = JSON.parse(value); query.set("status", status); if (reason) query.set("reason", reason); }
  }
  for (const name of ["offset", "limit"]) query.set(name, asked[name]);
  return query.toString();
}
function ways(reasons) {
  const now = JSON.stringify(reasons.map(([status, reason]) => [status, reason]));
  if (now === statuses) return;
  statuses = now;
  const select = $("filter").elements.status, chosen = select.value || given.get("status");
  select.replaceChildren();
  make(select, "option", {value: ""}, "in any way");
  for (const [value, words] of [[["trained"], "trained"], [["untrained"], "not trained"], ...reasons.map(([status, reason]) => [[status, reason], `${status}: ${reason}`])])
    make(select, "option", {value: JSON.stringify(value)}, words.slice(0, 80));
  select.value = [...select.options].some(option => option.value === chosen) ? chosen : "";
}
async function samples(s, isAsked = false) {
  ways(s.samples.reasons);
  if (!isAsked && s.samples.seen === seen) return;
  seen = s.samples.seen;
  if (!isAsked && asked.offset) return;  // newer ones would push the page away under its reader
  const question = filter(), answer = await fetch("samples.json?" + question, {cache: "no-store"});
  if (question !== filter()) return samples(s, true);
  if (!answer.ok) { $("samples-note").textContent = `— ${(await answer.text()).slice(0, 300)}`; return; }
  const page = await answer.json(), now = JSON.stringify(page.samples);
  const last = page.offset + page.samples.length, bounded = page.held < page.seen ? ` of ${short(page.held)} held, of ${short(page.seen)} shown by the run` : "";
  $("samples-note").textContent = page.seen ? `— ${short(page.found)} found${bounded}` : "— this journal holds none";
  $("place").textContent = page.samples.length ? `${page.offset + 1} to ${last} of ${short(page.found)}, the newest first` : "none";
  $("newer").disabled = page.offset === 0; $("older").disabled = last >= page.found;
  if (now === shown) return;
  shown = now;
  const parent = $("samples"); parent.replaceChildren();
  for (const one of page.samples) draw(parent, one);
}
function turn(by) { asked.offset = Math.max(0, asked.offset + by * asked.limit); refilter(false); }
function refilter(isNew = true) {
  if (isNew) asked.offset = 0;
  given.delete("status");
  history.replaceState(null, "", "#" + new URLSearchParams([...new FormData($("filter"))].filter(([, value]) => value !== "")));
  if (newest !== null) samples(newest, true).catch(error => { $("samples-note").textContent = `— ${error.message}`; });
}
$("filter").addEventListener("submit", event => { event.preventDefault(); refilter(); });
$("filter").addEventListener("change", () => refilter());
$("filter").addEventListener("reset", () => setTimeout(refilter, 0));
$("newer").addEventListener("click", () => turn(-1)); $("older").addEventListener("click", () => turn(1));
function draw(parent, one) {
  const card = make(parent, "article", {class: one.status === "trained" ? "sample" : "sample failed"}), head = make(card, "header");
  make(head, "b", {}, one.status === "trained" ? `reward ${short(one.reward)}` : `${one.status}: ${one.reason}`);
  if (one.status === "trained") make(head, "span", {}, `advantage ${short(one.advantage)}`);
  else if (one.reward !== null) make(head, "span", {}, `reward ${short(one.reward)}`);
  const parts = Object.entries(one.components);
  if (parts.length) make(head, "span", {class: "parts"}, parts.map(([name, value]) => `${name} ${short(value)}`).join(", "));
  make(head, "span", {}, `step ${one.step}`); make(head, "span", {}, `${one.num_tokens} tokens, ${one.finish}`);
  make(head, "span", {}, `versions ${span(one.pieces.map(p => p[0]).filter(v => v >= 0))}`); make(head, "span", {}, `rollout ${one.id}`);
  const keys = make(head, "span");
  for (const version of new Set(one.pieces.map(p => p[0]))) if (version >= 0) tint(make(keys, "span", {class: "key"}, `v${version}`), version);
  const facts = [...(one.error ? [["error", one.error]] : []), ...Object.entries(one.columns)];
  if (facts.length) { const list = make(card, "dl"); for (const [name, value] of facts) { make(list, "dt", {}, name); make(list, "dd", {}, value); } }
  const text = make(card, "div", {class: "text"});
  make(text, "span", {class: "prompt"}, one.prompt);
  const scores = new Map(one.step_scores);
  let at = 0;
  for (const [version, tokens] of one.pieces) for (const token of tokens) {
    const piece = make(text, "span", {class: "token", title: version < 0 ? "not sampled" : `sampled under version ${version}`}, token);
    tint(piece, version);
    if (scores.has(at)) {
      const score = scores.get(at), badge = make(text, "span", {class: "step", title: "score of the step that ends here"}, short(score));
      badge.style.background = `hsl(${120 * Math.max(0, Math.min(1, score))} 60% 50% / .3)`;
    }
    at += 1;
  }
}
let newest = null;
async function look() {
  try {
    const answer = await fetch("state.json" + location.search, {cache: "no-store"});
    if (!answer.ok) throw new Error(`${answer.status}`);
    const s = await answer.json();
    $("lost").textContent = "";
    newest = s; header(s); troubles(s); flow(s); stages(s); waits(s); plots(s); engines(s); await samples(s);
    document.body.dataset.drawn = s.steps_done;
    setTimeout(look, s.ended ? 10000 : 1000);
  } catch (error) {
    $("lost").textContent = `the view does not answer (${error.message}); trying again`;
    setTimeout(look, 3000);
  }
}
look();
