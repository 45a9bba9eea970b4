// The explorer's tab: which answer is shown, and how it is to have been read.
import { createExplorer, make, packInspection } from "./explorer.js";
import { ApiError, inspect } from "./api.js";
import { attentionName, attentionSettings } from "./settings.js";
import { createProgress } from "./progress.js";

const $ = id => document.getElementById(id);
const MOST_TOKENS = 256;  // of an answer, as the server allows
const KEPT = 8;  // inspections that need not be asked for again

// models(): what /v1/models says; isShown(): the tab is in front; failed(error): the key may be missing.
export function createExplore({ models, isShown, failed }) {
  const answers = [];
  let drawn = null, asking = null, explorer = null;
  const kept = new Map();  // by what was asked, the latest last

  const problem = text => {
    $("explore-problem").textContent = text;
    $("explore-problem").hidden = text === "";
  };
  const readAs = answer => answer.measured?.attention ?? answer.settings.attention;

  function settingsFor(answer) {
    const wanted = $("explore-as").value, was = readAs(answer);
    if (wanted === "" && was !== "dense") return answer.settings;
    // Dense attention chooses nothing: shown is what would be chosen with the switch's K.
    const now = attentionSettings(), sparse = was !== "dense" ? answer.settings : now.attention !== "dense" ? now : {};
    const { lambda, ...rest } = sparse;
    const attention = wanted || "phsa";
    return { ...rest, ...(attention === "phsa" && lambda !== undefined && { lambda }), attention };
  }

  function draw(answer, settings, found) {
    explorer = createExplorer($("explore-view"), packInspection(found), {
      title: make("h2", "", "What the attention read"), written: true, view: { query: found.queries[0].position },
    });
    const notes = [], was = readAs(answer);
    if ((settings.attention ?? was) !== was) {
      notes.push("Written with " + attentionName(was) + "; shown is what " + attentionName(settings.attention) +
        " would choose.");
    }
    if (answer.ids.length > MOST_TOKENS) notes.push("The first " + MOST_TOKENS + " tokens of the answer.");
    $("explore-note").textContent = notes.join(" ");
  }

  async function ask(answer, settings, signal) {
    const progress = createProgress(), ticking = setInterval(progress.draw, 200);
    $("explore-progress").replaceChildren(progress.element);
    $("explore-stop").hidden = false;
    try {
      const body = {
        model: answer.model, prompt: answer.promptIds, answer: answer.ids.slice(0, MOST_TOKENS), phsa: settings,
      };
      const found = await inspect(body, progress.take, signal);
      // The last token is nobody's query: nothing was written after it.
      found.queries = found.queries.filter(query => query.position + 1 < found.text.length);
      return found;
    } finally {
      clearInterval(ticking);
      progress.element.remove();
    }
  }

  async function show() {
    const answer = answers[$("explore-answer").value];
    const empty = !answer;
    $("explore-empty").hidden = !empty;
    document.querySelector(".chooser").hidden = empty;
    if (empty || !isShown()) {
      if (empty) {
        asking?.abort();
        $("explore-view").replaceChildren();
        drawn = explorer = null;
      }
      return;
    }
    const settings = settingsFor(answer), wish = JSON.stringify([answers.indexOf(answer), settings]);
    if (wish === drawn) return;
    drawn = wish;
    asking?.abort();
    const mine = asking = new AbortController();
    problem("");
    $("explore-again").hidden = true;
    $("explore-note").textContent = "";
    $("explore-view").classList.add("stale");
    try {
      // Tokens are those of one model.
      if (!models().some(model => model.id === answer.model)) {
        throw new ApiError("This answer is " + answer.model + "'s, which is not served here; ask again.", 0);
      }
      const found = kept.get(wish) ?? await ask(answer, settings, mine.signal);
      kept.delete(wish);
      kept.set(wish, found);
      if (kept.size > KEPT) kept.delete(kept.keys().next().value);
      if (asking === mine) draw(answer, settings, found);
    } catch (error) {
      if (asking !== mine) return;
      drawn = null;
      if (error.name === "AbortError") {
        $("explore-note").textContent = "Stopped.";
        $("explore-again").hidden = false;
      } else {
        problem(error.message);
        failed(error);
      }
    }
    if (asking !== mine) return;
    $("explore-stop").hidden = true;
    $("explore-view").classList.remove("stale");
  }

  function choose(answer) {
    if (!answer) {
      answers.length = 0;
      kept.clear();
    } else if (!answers.includes(answer)) {
      answers.push(answer);
    }
    $("explore-answer").replaceChildren(...answers.map((one, i) => new Option(
      i + 1 + ": " + attentionName(readAs(one)) + ", “" + one.question.slice(0, 60) + "”", i)));
    $("explore-answer").value = answers.indexOf(answer);
    if (!answer) show();
  }

  $("explore-answer").addEventListener("change", show);
  $("explore-as").addEventListener("change", show);
  $("explore-stop").addEventListener("click", () => asking?.abort());
  $("explore-again").addEventListener("click", show);
  document.addEventListener("keydown", event => {
    if (!isShown()) return;
    if (explorer?.onKey(event)) return;
    if (event.key === "Escape" && !$("explore-stop").hidden) asking?.abort();
  });
  return { choose, show };
}
