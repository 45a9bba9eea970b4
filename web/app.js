import { getModel, hasKey, setKey } from "./api.js";
import { createChat } from "./chat.js";
import { createExplore } from "./explore.js";
import { installComparison } from "./comparison.js";
import { installConversations } from "./conversations.js";
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
  $("key-label").textContent = hasKey() ? "This key is wrong; give the one that the server was started with"
    : "The server asks for a key";
  $("key-form").classList.toggle("wrong", hasKey());
  $("key-form").hidden = false;
  $("key").select();
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
  chat.problem("");
  $("model").textContent = model.id + ", " + number(model.max_model_len) + " tokens";
  installSettings(model);
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
installTheme($("theme"));
installComparison();
installConversations(chat);
openTab("chat");
start();
