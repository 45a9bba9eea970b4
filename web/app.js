import { getModel, setKey } from "./api.js";
import { createChat } from "./chat.js";
import { createExplore } from "./explore.js";
import { installComparison } from "./comparison.js";
import { installSettings } from "./settings.js";
import { installTheme } from "./theme.js";
import { number } from "./explorer.js";

const $ = id => document.getElementById(id);
const TABS = ["chat", "explorer"];
let model = null;

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
  $("key-form").hidden = false;
  $("key").focus();
}

const explore = createExplore({ isShown: () => !$("explorer").hidden, failed });
const chat = createChat({
  model: () => model, failed,
  explore: (answer, quietly) => {
    explore.choose(answer);
    if (quietly) return;
    openTab("explorer");
    $("tab-explorer").focus();
  },
});

async function start() {
  try {
    model = await getModel();
  } catch (error) {
    if (error.status !== 401) chat.problem(error.message);
    failed(error);
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = model.id + ", " + number(model.max_model_len) + " tokens";
  installSettings(model);
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
installTheme($("theme"));
installComparison();
openTab("chat");
start();
