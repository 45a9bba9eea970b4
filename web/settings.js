// The switch: how the next request is read.
const $ = id => document.getElementById(id);
const NAMES = { dense: "dense", infllm2: "InfLLM v2", phsa: "PHSA" };
const number = id => $(id).value.trim() === "" ? undefined : Number($(id).value);
let own = "dense";  // what the server does by itself

export const attentionName = name => NAMES[name ?? own] ?? name ?? own;

// None is checked where the server's own is none of them.
function applies() {
  const attention = document.querySelector("[name=attention]:checked")?.value;
  for (const id of ["top-k", "init", "local"]) $(id).disabled = (attention ?? own) === "dense";
  $("lambda").disabled = (attention ?? own) !== "phsa";
  $("parts").disabled = $("top-k").disabled;
  return attention;
}

// The field `phsa` of a request: what the user set. What is empty is left to the server, and so to the model.
export function attentionSettings() {
  const attention = applies();
  if ((attention ?? own) === "dense") return { attention };
  const settings = { attention, top_k: number("top-k"), init: number("init"), local: number("local") };
  if (!$("lambda").disabled) settings.lambda = number("lambda");
  if ($("parts").value !== "") settings.parts = Number($("parts").value);
  return settings;
}

export const answerSettings = () => ({ max_tokens: number("max-tokens"), temperature: number("temperature") });

// Begins with what the server does by itself; its numbers stand in the empty fields.
export function installSettings(model) {
  const { attention, settings } = model.phsa;
  own = attention;
  const radio = document.querySelector(`[name=attention][value="${CSS.escape(attention)}"]`);
  if (radio) radio.checked = true;
  const shown = { "top-k": settings.top_k, lambda: settings.lambda, init: settings.init_tokens,
    local: settings.local_tokens };
  for (const [id, value] of Object.entries(shown)) $(id).placeholder = Array.isArray(value) ? "by head" : value;
  $("parts").options[0].text = `as the server (${settings.parts ?? 1})`;
  for (const input of document.getElementsByName("attention")) input.addEventListener("change", applies);
  applies();
}
