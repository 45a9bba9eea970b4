// The explorer's tab: which answer is shown, and how it is to have been read.
import { createExplorer, make, packInspection } from "./explorer.js";
import { inspect } from "./api.js";
import { attentionName, attentionSettings } from "./settings.js";

const $ = id => document.getElementById(id);
const MOST_TOKENS = 256;  // of an answer, as the server allows

// isShown(): the tab is in front; failed(error): the key may be missing.
export function createExplore({ isShown, failed }) {
  const answers = [];
  let drawn = null, asking = null, explorer = null;

  const problem = text => {
    $("explore-problem").textContent = text;
    $("explore-problem").hidden = text === "";
  };

  function settingsFor(answer) {
    const wanted = $("explore-as").value, was = answer.settings.attention;
    if (wanted === "" && was !== "dense") return answer.settings;
    // Dense attention chooses nothing: shown is what would be chosen with the switch's K.
    const now = attentionSettings(), sparse = was !== "dense" ? answer.settings : now.attention !== "dense" ? now : {};
    const { lambda, ...rest } = sparse;
    const attention = wanted || "phsa";
    return { ...rest, ...(attention === "phsa" && { lambda }), attention };
  }

  async function show() {
    const answer = answers[$("explore-answer").value];
    const empty = !answer;
    $("explore-empty").hidden = !empty;
    document.querySelector(".chooser").hidden = empty;
    if (empty || !isShown()) {
      if (empty) {
        $("explore-view").replaceChildren();
        drawn = explorer = null;
      }
      return;
    }
    const settings = settingsFor(answer), wish = JSON.stringify([$("explore-answer").value, settings]);
    if (wish === drawn) return;
    drawn = wish;
    asking?.abort();
    const mine = asking = new AbortController();
    problem("");
    $("explore-view").classList.add("stale");
    $("explore-note").textContent = "Reading the text again…";
    try {
      const ids = answer.ids.slice(0, MOST_TOKENS);
      const found = await inspect({ prompt: answer.promptIds, answer: ids, phsa: settings }, mine.signal);
      // The last token is nobody's query: nothing was written after it.
      found.queries = found.queries.filter(query => query.position + 1 < found.text.length);
      explorer = createExplorer($("explore-view"), packInspection(found), {
        title: make("h2", "", "What the attention read"), written: true, view: { query: found.queries[0].position },
      });
      const notes = [];
      if (settings.attention !== answer.settings.attention) {
        notes.push("Written with " + attentionName(answer.settings.attention) + "; shown is what " +
          attentionName(settings.attention) + " would choose.");
      }
      if (ids.length < answer.ids.length) notes.push("The first " + MOST_TOKENS + " tokens of the answer.");
      $("explore-note").textContent = notes.join(" ");
    } catch (error) {
      if (error.name === "AbortError") return;
      drawn = null;
      $("explore-note").textContent = "";
      problem(error.message);
      failed(error);
    }
    if (asking === mine) $("explore-view").classList.remove("stale");
  }

  function choose(answer) {
    if (!answer) {
      answers.length = 0;
    } else if (!answers.includes(answer)) {
      answers.push(answer);
    }
    $("explore-answer").replaceChildren(...answers.map((one, i) => new Option(
      i + 1 + ": " + attentionName(one.settings.attention) + ", “" + one.question.slice(0, 60) + "”", i)));
    $("explore-answer").value = answers.indexOf(answer);
  }

  $("explore-answer").addEventListener("change", show);
  $("explore-as").addEventListener("change", show);
  document.addEventListener("keydown", event => { if (isShown()) explorer?.onKey(event); });
  return { choose, show };
}
