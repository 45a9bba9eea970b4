// The switch: how the next request is read.
const $ = id => document.getElementById(id);
const NAMES = { dense: "dense", infllm2: "InfLLM v2", phsa: "PHSA" };
const number = id => $(id).value.trim() === "" ? undefined : Number($(id).value);
let own = "dense";  // what the server does by itself
let chatTokens = 1024;

export const ALL = Object.keys(NAMES);
export const attentionName = name => NAMES[name ?? own] ?? name ?? own;

// None is checked where the server's own is none of them.
const chosen = () => document.querySelector("[name=attention]:checked")?.value ?? own;

function applies() {
  for (const id of ["top-k", "init", "local", "parts"]) $(id).disabled = chosen() === "dense";
  $("lambda").disabled = chosen() !== "phsa";
}

// What the user set of the field `phsa` of a request, and nothing else: all other settings are the server's, and so the
// model's. name: of the attention, where it is not the switch that says.
export function attentionSettings(name = chosen()) {
  const settings = name === own ? {} : { attention: name };
  if (name === "dense") return settings;
  const set = { top_k: number("top-k"), init: number("init"), local: number("local"), parts: number("parts") };
  if (name === "phsa") set.lambda = number("lambda");
  return JSON.parse(JSON.stringify({ ...settings, ...set }));  // without what is empty
}

// isChat: else the API's own limit is 16 tokens.
export function answerSettings(isChat) {
  const set = { max_tokens: number("max-tokens") ?? (isChat ? undefined : chatTokens),
    temperature: number("temperature") };
  return JSON.parse(JSON.stringify(set));
}
export const wantsSources = () => $("want-sources").checked;

// "PHSA, K 6, λ 0.9, init 16, local 64": how an answer was read, as the server says, or as it was asked for.
export function settingsLine({ attention, top_k: k, lambda, init, local, parts }) {
  const some = (name, value) => value === undefined || value === null ? [] : [name + " " + value];
  return [attentionName(attention), ...some("K", k), ...some("λ", lambda), ...some("init", init),
    ...some("local", local), ...(parts > 1 ? some("parts", parts) : [])].join(", ");
}

// What the server does by itself with this model is chosen, and its numbers stand in the empty fields.
export function showSettings(model) {
  const { attention, settings, sampling } = model.phsa;
  own = attention;
  chatTokens = model.phsa.chat_tokens;
  for (const radio of document.getElementsByName("attention")) radio.checked = radio.value === attention;
  const shown = { "top-k": settings.top_k, lambda: settings.lambda, init: settings.init,
    local: settings.local, "max-tokens": chatTokens, temperature: sampling.temperature };
  for (const [id, value] of Object.entries(shown)) $(id).placeholder = Array.isArray(value) ? "by head" : value;
  $("parts").options[0].text = `as the server (${settings.parts ?? 1})`;
  applies();
}

export function installSettings() {
  for (const input of document.getElementsByName("attention")) input.addEventListener("change", applies);
}
