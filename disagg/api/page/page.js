
"use strict";
const KEEP = 120, WINDOW = 10, WIDTH = 300, HEIGHT = 80;
const STATES = ["in_use", "filling", "reserved", "cached", "free"];
const byId = id => document.getElementById(id);
const make = (tag, cls, text) => {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== undefined) element.textContent = text;
  return element;
};
const shape = (cls, d) => {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("class", cls);
  path.setAttribute("d", d);
  return path;
};

// ---- asking

let key = sessionStorage.getItem("disagg-key") || "";
const headers = () => key ? {Authorization: "Bearer " + key} : {};
async function get(path) {
  const answer = await fetch(path, {headers: headers(), cache: "no-store", signal: AbortSignal.timeout(5000)});
  if (answer.status === 401) askForKey();
  if (!answer.ok && path !== "readyz") throw new Error(path + ": HTTP " + answer.status);
  return answer;
}
function askForKey() {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
}
byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("disagg-key", key);
  byId("key").value = "";
  byId("key-form").hidden = true;
});

// ---- figures: the difference of two samples of /metrics

function parse(text) {
  const sums = {}, buckets = {};
  for (const line of text.split("\n")) {
    const found = /^(disagg_\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    sums[name] = (sums[name] || 0) + Number(value);
    const le = labels && /^le="([^"]+)"$/.exec(labels);
    if (le) (buckets[name] ||= []).push([le[1] === "+Inf" ? Infinity : Number(le[1]), Number(value)]);
  }
  return {sums, buckets};
}
const grown = (from, to, name) => {
  const before = from.sums[name] || 0, now = to.sums[name] || 0;
  return now < before ? now : now - before;  // a counter that shrank began again
};
function quantile(from, to, name, q) {
  const before = from.buckets[name + "_bucket"] || [], now = to.buckets[name + "_bucket"] || [];
  const counts = now.map(([le, n], i) => [le, n - (before[i] ? before[i][1] : 0)]);
  const total = counts.length ? counts[counts.length - 1][1] : 0;
  if (total <= 0) return null;
  let lower = 0, below = 0;
  for (const [le, n] of counts) {
    if (n >= q * total && n > below) return le === Infinity ? lower : lower + (le - lower) * (q * total - below) / (n - below);
    lower = le; below = n;
  }
  return lower;
}

const CHARTS = [
  {title: "Tokens", unit: "/s", lines: [["", (from, to, s) => grown(from, to, "disagg_generated_tokens_total") / s]], span: 1},
  {title: "Time to first token", unit: "ms", lines: percentiles("disagg_ttft_seconds"), span: WINDOW},
  {title: "Gap between tokens", unit: "ms", lines: percentiles("disagg_itl_seconds"), span: WINDOW},
  {title: "Hand-over rate", unit: "GB/s", span: WINDOW, lines: [["", (from, to) => {
    const seconds = grown(from, to, "disagg_transfer_seconds_total");
    return seconds > 0 ? grown(from, to, "disagg_transfer_bytes_total") / seconds / 1e9 : null;
  }]]},
  {title: "KV in use, fullest worker", unit: "%", top: 100, span: 1, lines: [["", (from, to) => to.occupancy]]},
  {title: "Requests", unit: "", span: 1, lines: [["served", (from, to) => to.served], ["queued", (from, to) => to.queued]]},
];
function percentiles(name) {
  const at = q => (from, to) => { const v = quantile(from, to, name, q); return v === null ? null : v * 1e3; };
  return [["p50", at(.5)], ["p95", at(.95)]];
}
const short = v => v === null || v === undefined ? "–" : Number.isInteger(v) ? String(v) : v.toFixed(v >= 100 ? 0 : v >= 1 ? 1 : 2);
function ceiling(v) {
  if (!(v > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].find(m => m * step >= v) * step;
}

const samples = [];
for (const chart of CHARTS) {
  const figure = make("figure"), caption = make("figcaption", "", chart.title);
  chart.value = make("span", "value");
  caption.append(chart.value);
  chart.keys = make("div", "keys");
  const plot = make("div", "plot");
  chart.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  chart.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  chart.svg.setAttribute("preserveAspectRatio", "none");
  chart.svg.setAttribute("role", "img");
  chart.scale = make("span");
  plot.append(chart.svg, chart.scale);
  figure.append(caption, chart.keys, plot);
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    chart.at = Math.round((event.clientX - box.left) / box.width * (KEEP - 1)) - (KEEP - samples.length);
    draw(chart);
  });
  plot.addEventListener("pointerleave", () => { chart.at = undefined; draw(chart); });
  byId("charts").append(figure);
}
function draw(chart) {
  const rows = samples.map(sample => sample.points.get(chart) || []);
  const at = chart.at >= 0 && chart.at < rows.length ? chart.at : rows.length - 1;
  const shown = rows[at] || [];
  const top = chart.top || ceiling(Math.max(0, ...rows.flat().filter(v => v !== null)));
  const x = i => (i + KEEP - rows.length) / (KEEP - 1) * WIDTH, y = v => HEIGHT - v / top * HEIGHT;
  chart.svg.replaceChildren(shape("grid", `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}`));
  chart.lines.forEach((line, n) => {
    let d = "", pen = "M";
    rows.forEach((row, i) => {
      if (row[n] === null || row[n] === undefined) { pen = "M"; return; }
      d += `${pen}${x(i).toFixed(1)} ${y(row[n]).toFixed(1)}` + (pen === "M" ? "h.1" : "");
      pen = "L";
    });
    chart.svg.append(shape(n ? "b" : "a", d));
  });
  if (chart.at !== undefined && at === chart.at) chart.svg.append(shape("at", `M${x(at)} 0V${HEIGHT}`));
  chart.scale.textContent = `${short(top)} ${chart.unit}`;
  chart.value.replaceChildren(short(shown[0]), make("small", "", chart.unit));
  const ago = Math.round((samples[samples.length - 1].time - samples[at].time) / 1e3);
  chart.keys.replaceChildren(...chart.lines.filter(([name]) => name).map(([name], n) => {
    const item = make("span");
    item.append(make("i", n ? "b" : "a"), `${name} ${short(shown[n])}`);
    return item;
  }), ...(chart.at !== undefined ? [make("span", "", `${ago} s ago`)] : []));
  chart.svg.setAttribute("aria-label", `${chart.title}: ` + chart.lines.map(([name], n) => `${name} ${short(shown[n])} ${chart.unit}`).join(", "));
}

// ---- workers

for (const state of STATES) {
  const item = make("span");
  item.append(make("i", state), state.replace("_", " "));
  byId("legend").append(item);
}
function showWorkers(status) {
  byId("workers").replaceChildren(...status.workers.map(worker => {
    const item = make("li"), row = make("div", "row"), bar = make("div", "bar"), blocks = worker.blocks;
    const held = blocks.in_use + blocks.filling + blocks.reserved;
    row.append(make("b", "", worker.id), make("span", "pill " + (worker.state === "ready" ? "good" : "bad"), worker.state),
      make("small", "", worker.device + (worker.node ? " on " + worker.node : "") + (worker.restarts ? `, restarted ${worker.restarts}×` : "")),
      make("span", "end", `${worker.requests.running} running, ${worker.requests.waiting} waiting · ${held} of ${blocks.total} blocks held, ${blocks.cached} cached`));
    for (const state of STATES) {
      if (!blocks[state]) continue;
      const part = make("div", state);
      part.style.flexGrow = blocks[state];
      part.title = `${state.replace("_", " ")}: ${blocks[state]} blocks`;
      bar.append(part);
    }
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", STATES.map(state => `${blocks[state]} ${state.replace("_", " ")}`).join(", "));
    item.append(row, bar);
    return item;
  }));
  byId("pairs").replaceChildren(...(status.pairs.length ? status.pairs.map(pair => {
    const item = make("li"), row = make("div", "row");
    row.append(make("b", "", `${pair.prefill} → ${pair.decode}`), make("small", "", pair.transport || "connecting"),
      make("span", "end", pair.gb_per_s ? `${pair.gb_per_s.toFixed(1)} GB/s when proven` : "not proven yet"));
    item.append(row);
    return item;
  }) : [make("li", "", "No pairs: every worker does both prefill and decode.")]));
}

// ---- once a second

async function sample() {
  const [ready, status, text] = await Promise.all([
    get("readyz").then(a => a.json()), get("v1/disagg/status").then(a => a.json()), get("metrics").then(a => a.text())]);
  const now = Object.assign(parse(text), {time: performance.now(), points: new Map(), run: status.run_id});
  const used = status.workers.map(w => w.blocks.total ? (w.blocks.in_use + w.blocks.filling + w.blocks.reserved) / w.blocks.total : 0);
  now.occupancy = 100 * Math.max(0, ...used);
  now.queued = status.requests.queued;
  now.served = Object.values(status.requests).reduce((a, b) => a + b, 0) - now.queued;
  if (samples.length && samples[samples.length - 1].run !== now.run) samples.length = 0;  // another server now
  samples.push(now);
  if (samples.length > KEEP) samples.shift();
  for (const chart of CHARTS) {
    const from = samples[Math.max(0, samples.length - 1 - chart.span)];
    const seconds = Math.max((now.time - from.time) / 1e3, .001);
    now.points.set(chart, chart.lines.map(([, figure]) => samples.length > 1 ? figure(from, now, seconds) : null));
    draw(chart);
  }
  showWorkers(status);
  byId("model").textContent = status.model;
  const reasons = ready.reasons || [];
  setState(reasons.length ? reasons.join("; ") : status.degraded ? "ready, degraded" : "ready", !reasons.length);
  byId("facts").textContent = `${status.mode} · context ${status.max_model_len} · up ${span(status.uptime_s)}`;
}
const span = s => s < 120 ? `${s.toFixed(0)} s` : s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
function setState(text, good) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = "pill " + (good ? "good" : "bad");
  document.querySelector("main > section").classList.toggle("stale", text === "no answer");
}
async function watch() {
  for (;;) {
    if (!document.hidden && byId("key-form").hidden) {
      try { await sample(); } catch (error) { setState(byId("key-form").hidden ? "no answer" : "key needed", false); }
    }
    await new Promise(done => setTimeout(done, 1000));
  }
}
watch();

// ---- chat

let messages = [], running = null;
const log = byId("log");
function say(cls, text) {
  const line = make("p", cls, text);
  log.append(line);
  log.scrollTop = log.scrollHeight;
  return line;
}
function reset() {
  if (running) running.abort();
  running = null;
  messages = [];
  log.replaceChildren();
  say("hint", "Prompts and answers stay in this tab.");
  byId("timing").textContent = "";
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}
async function ask(text) {
  if (!messages.length) log.replaceChildren();
  const control = running = new AbortController(), begun = performance.now();
  messages.push({role: "user", content: text});
  say("user", text);
  const line = say("assistant", "…");
  byId("stop").disabled = false;
  byId("send").disabled = true;
  let answer = "", first = 0, usage = null, frame = 0;
  const show = () => {  // once a frame: laying the whole answer out for each token would leave no time for keys
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    frame = 0;
    line.textContent = answer;
    if (follows) log.scrollTop = log.scrollHeight;
  };
  try {
    const response = await fetch("v1/chat/completions", {method: "POST", signal: control.signal,
      headers: {"Content-Type": "application/json", ...headers()},
      body: JSON.stringify({messages, temperature: 0.3, stream: true, stream_options: {include_usage: true}})});
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const delta = event.choices.length ? event.choices[0].delta.content || "" : "";
      if (!delta) continue;
      first ||= performance.now();
      answer += delta;
      frame ||= requestAnimationFrame(show);
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  if (control.signal.aborted && running !== control) return;  // a new chat has begun
  running = null;
  cancelAnimationFrame(frame);
  if (answer) { show(); messages.push({role: "assistant", content: answer}); } else { line.remove(); messages.pop(); }
  const tokens = usage && usage.completion_tokens, took = (performance.now() - first) / 1e3;
  byId("timing").textContent = first ? `first token after ${(first - begun).toFixed(0)} ms` + (tokens > 1 ? `, then ${((tokens - 1) / took).toFixed(1)} tokens/s` : "") : "";
  byId("stop").disabled = true;
  byId("send").disabled = false;
  byId("text").focus();
}
byId("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  ask(text);
});
byId("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); byId("ask").requestSubmit(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && running) running.abort(); });
byId("stop").addEventListener("click", () => { if (running) running.abort(); });
byId("reset").addEventListener("click", () => { reset(); byId("stop").disabled = true; byId("send").disabled = false; byId("text").focus(); });
reset();
