import { getModels, hasKey, setKey, setModel } from "./api.js";
import { createChat } from "./chat.js";
import { createExplore } from "./explore.js";
import { installComparison } from "./comparison.js";
import { installConversations } from "./conversations.js";
import { installSettings, showSettings } from "./settings.js";
import { installTheme } from "./theme.js";
import { number } from "./explorer.js";

const $ = id => document.getElementById(id);
const TABS = ["chat", "explorer"];
let models = [], model = null;

function openTab(name) {
  for (const tab of TABS) {
    $(tab).hidden = tab !== name;
    $("tab-" + tab).setAttribute("aria-selected", tab === name);
    $("tab-" + tab).tabIndex = tab === name ? 0 : -1;
  }
  explore.show();
}

function failed(error) {
  if (error.status !== 401) return;
  $("key-label").textContent = hasKey() ? "This key is wrong; give the one that the server was started with"
    : "The server asks for a key";
  $("key-form").hidden = false;
  $("key").select();
  $("key").focus();
}

const explore = createExplore({ models: () => models, isShown: () => !$("explorer").hidden, failed });
const chat = createChat({
  models: () => models, model: () => model, failed,
  explore: (answer, quietly) => {
    explore.choose(answer);
    if (quietly) return;
    openTab("explorer");
    $("tab-explorer").focus();
  },
});

function useModel(chosen) {
  model = chosen;
  setModel(model.id);
  $("model").textContent = (models.length > 1 ? "" : model.id + ", ") + number(model.max_model_len) + " tokens";
  showSettings(model);
  chat.count();
}

async function start() {
  try {
    models = await getModels();
  } catch (error) {
    if (error.status !== 401) chat.problem(error.message);
    failed(error);
    return;
  }
  $("key-form").hidden = true;
  chat.problem("");
  $("models").hidden = models.length === 1;
  $("models").replaceChildren(...models.map(one => new Option(one.id, one.id)));
  useModel(models[0]);
  if (location.hash.length > 1) await chat.open(location.hash.slice(1));
}

for (const tab of TABS) $("tab-" + tab).addEventListener("click", () => openTab(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = $("chat").hidden ? "chat" : "explorer";
  openTab(other);
  $("tab-" + other).focus();
});
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  setKey($("key").value);
  start();
});
$("models").addEventListener("change", () => {
  useModel(models[$("models").selectedIndex]);
  chat.recount();
});
installSettings();
installTheme($("theme"));
installComparison();
installConversations(chat);
openTab("chat");
start();
