// The speeds of earlier answers, and how those to one question compare.
import { make, number, percent } from "./explorer.js";
import { attentionName } from "./settings.js";

const MOST = 100;
const $ = id => document.getElementById(id);
let rows = [];  // {turn, model, measured, usage}, the latest first

const speed = value => value > 0 ? number(Math.round(value * (value < 10 ? 10 : 1)) / (value < 10 ? 10 : 1)) : "–";
const times = value => Number.isFinite(value) && value > 0 ? value.toFixed(value < 10 ? 1 : 0) + "×" : "–";
export const seconds = value => value < 10 ? value.toFixed(2) : value.toFixed(1);

const KINDS = [["prefill", "prefill_tokens_per_s"], ["decode", "decode_tokens_per_s"]];
const isLike = (row, other) => row.turn === other.turn && row.model === other.model;
const denseOf = row => rows.find(one => isLike(one, row) && one.measured.attention === "dense");
// The speed of a prefill says little where most of the prompt was in the cache.
const isFresh = ({ measured, usage }) => 2 * measured.cached_prompt_tokens < usage.prompt_tokens;
function timesDense(row, key) {
  const dense = denseOf(row), counts = key === "decode_tokens_per_s" || (dense && isFresh(row) && isFresh(dense));
  return dense && counts ? row.measured[key] / dense.measured[key] : NaN;
}

function makeRow(row) {
  const { measured, usage } = row, prompt = make("td", "", number(usage.prompt_tokens)), against = make("td");
  if (measured.cached_prompt_tokens > 0) {
    prompt.append(make("small", "", number(measured.cached_prompt_tokens) + " cached"));
  }
  if (!denseOf(row) || measured.attention === "dense") against.textContent = "–";
  else against.textContent = KINDS.map(([, key]) => times(timesDense(row, key))).join(" ");
  const element = make("tr"), name = make("td", "", attentionName(measured.attention));
  if (rows.some(one => one.model !== row.model)) name.append(make("small", "model", row.model));
  element.append(name, make("td", "", measured.top_k ?? "–"), prompt,
    make("td", "", seconds(measured.time_to_first_token_s)), make("td", "", speed(measured.prefill_tokens_per_s)),
    make("td", "", speed(measured.decode_tokens_per_s)), against, make("td", "", percent(measured.read_share)));
  return element;
}

// The latest question that was answered in several ways: a bar for each.
function makeChart() {
  const latest = rows.find(row => rows.some(one => isLike(one, row) &&
    one.measured.attention !== row.measured.attention));
  if (!latest) return [];
  const own = [];  // one of each attention, in the order in which they were asked
  for (const row of rows.filter(one => isLike(one, latest))) {
    if (!own.some(one => one.measured.attention === row.measured.attention)) own.unshift(row);
  }
  return KINDS.map(([name, key]) => {
    const group = make("div", "bars"), most = Math.max(...own.map(row => row.measured[key]), 1e-9);
    group.append(make("h3", "", name + ", tokens/s"));
    for (const row of own) {
      const line = make("div", "bar-line"), track = make("span", "track"), bar = make("i", row.measured.attention);
      bar.style.width = 100 * row.measured[key] / most + "%";
      track.append(bar);
      const against = row.measured.attention === "dense" ? "" : times(timesDense(row, key));
      line.append(make("span", "", attentionName(row.measured.attention)), track,
        make("b", "", speed(row.measured[key])), make("em", "", against === "–" ? "" : against));
      group.append(line);
    }
    return group;
  });
}

function show() {
  const empty = rows.length === 0;
  $("compare-empty").hidden = !empty;
  $("compare-clear").hidden = $("compare-scroll").hidden = empty;
  $("compare").replaceChildren(...rows.map(makeRow));
  $("compare-chart").replaceChildren(...makeChart());
}

// turn: the question; measured: the object `phsa` of its answer; usage: OpenAI's.
export function addMeasured(turn, { model, measured, usage }) {
  if (rows.some(row => row.measured === measured)) return;
  rows.unshift({ turn, model, measured, usage });
  rows = rows.slice(0, MOST);
  show();
}

export function measuredLine(measured) {
  return [
    "first token " + seconds(measured.time_to_first_token_s) + " s",
    "prefill " + speed(measured.prefill_tokens_per_s) + " tokens/s",
    "decode " + speed(measured.decode_tokens_per_s) + " tokens/s",
    percent(measured.read_share) + " read",
  ].join(" · ");
}

export function installComparison() {
  $("compare-clear").addEventListener("click", () => { rows = []; show(); });
}
