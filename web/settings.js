// The switch: how the next request is read.
const $ = id => document.getElementById(id);
const NAMES = { dense: "dense", infllm2: "InfLLM v2", phsa: "PHSA" };
const number = id => $(id).value.trim() === "" ? undefined : Number($(id).value);

export const attentionName = name => NAMES[name] ?? name;

function applies() {
  const attention = document.querySelector("[name=attention]:checked").value;
  for (const id of ["top-k", "init", "local"]) $(id).disabled = attention === "dense";
  $("lambda").disabled = attention !== "phsa";
  return attention;
}

// The field `phsa` of a request. What is empty is left to the server.
export function attentionSettings() {
  const attention = applies();
  if (attention === "dense") return { attention };
  const settings = { attention, top_k: number("top-k"), init: number("init"), local: number("local") };
  if (attention === "phsa") settings.lambda = number("lambda");
  return settings;
}

export const answerSettings = () => ({ max_tokens: number("max-tokens"), temperature: number("temperature") });

// Begins with what the server does by itself.
export function installSettings(model) {
  const { attention, settings } = model.phsa;
  const radio = document.querySelector(`[name=attention][value="${CSS.escape(attention)}"]`);
  if (radio) radio.checked = true;
  if (settings.top_k) $("top-k").value = settings.top_k;
  if (settings.lambda !== undefined && attention === "phsa") $("lambda").value = settings.lambda;
  for (const input of document.getElementsByName("attention")) input.addEventListener("change", applies);
  applies();
}
