// The speeds of earlier answers.
import { make, number, percent } from "./explorer.js";
import { attentionName } from "./settings.js";

const MOST = 100;
const $ = id => document.getElementById(id);

function show() {
  const empty = $("compare").children.length === 0;
  $("compare-empty").hidden = !empty;
  $("compare-clear").hidden = $("compare-scroll").hidden = empty;
}

const speed = value => value > 0 ? number(Math.round(value * (value < 10 ? 10 : 1)) / (value < 10 ? 10 : 1)) : "–";
export const seconds = value => value < 10 ? value.toFixed(2) : value.toFixed(1);

// measured: the object `phsa` of an answer; usage: OpenAI's.
export function addMeasured(measured, usage) {
  const prompt = make("td", "", number(usage.prompt_tokens));
  const cached = measured.cached_prompt_tokens;
  if (cached > 0) prompt.append(make("small", "", number(cached) + " cached"));
  const row = make("tr");
  row.append(make("td", "", attentionName(measured.attention)), make("td", "", measured.top_k ?? "–"), prompt,
    make("td", "", seconds(measured.time_to_first_token_s)), make("td", "", speed(measured.prompt_tokens_per_s)),
    make("td", "", speed(measured.decode_tokens_per_s)), make("td", "", percent(measured.read_share)));
  $("compare").prepend(row);
  if ($("compare").children.length > MOST) $("compare").lastChild.remove();
  show();
}

export function measuredLine(measured) {
  return [
    "first token " + seconds(measured.time_to_first_token_s) + " s",
    "reads " + speed(measured.prompt_tokens_per_s) + " tokens/s",
    "writes " + speed(measured.decode_tokens_per_s) + " tokens/s",
    percent(measured.read_share) + " read",
  ].join(" · ");
}

export function installComparison() {
  $("compare-clear").addEventListener("click", () => { $("compare").replaceChildren(); show(); });
}
