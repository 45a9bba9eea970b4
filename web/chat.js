// The conversation: questions with their documents, answers with their sources, kept in this browser.
import { make, makeButton, number, percent, rove } from "./explorer.js";
import { stream, tokenize } from "./api.js";
import { ALL, answerSettings, attentionSettings, settingsLine, wantsSources } from "./settings.js";
import { addMeasured, measuredLine, seconds } from "./comparison.js";
import { contentOf, createDocuments, makeChip } from "./documents.js";
import { createMarkdown, makeCopyButton } from "./markdown.js";
import { createProgress } from "./progress.js";
import { createReader, decorateAnswer, locateSources, makeSourceList } from "./sources.js";
import { load, newId, save } from "./store.js";

const $ = id => document.getElementById(id);
const TITLE = 80;  // characters of a conversation's title
const SILENT = 3;  // tokens in whose time none came

// What is kept of an answer: `settings` are those that were asked for, `measured` what the server says.
const KEPT = ["model", "text", "thoughts", "ids", "promptIds", "settings", "measured", "usage", "sources", "line"];

// models(), model(): what /v1/models says, and the one that is chosen; failed(error): the key may be missing;
// explore(answer): shows what it read.
export function createChat({ models, model, failed, explore }) {
  const turns = [];  // {documents, question, answers, element}; the last answer is the one that counts
  let id = newId(), running = null, counting = null;

  const problem = text => {
    $("problem").textContent = text;
    $("problem").hidden = text === "";
  };
  const documents = createDocuments({
    context: () => model()?.max_model_len ?? Infinity, problem, failed, changed: () => count(),
  });
  const reader = createReader();

  // A model without a chat template goes on with the text as it is.
  const isChat = () => model()?.phsa.chat_template !== null;
  // The request's text, and where the documents stand in it (sources.js).
  function promptOf(before, turn) {
    const messages = [], parts = [];
    let written = 0;  // characters of a prompt that is no chat
    const ask = (asked, turnIndex) => {
      const { text, parts: own } = contentOf(asked);
      for (const [begin, document] of own) {
        const from = begin + (isChat() ? 0 : written);
        parts.push({ begin: from, end: from + document.text.length, message: isChat() ? messages.length : null,
          turn: turnIndex, document: asked.documents.indexOf(document) });
      }
      messages.push({ role: "user", content: text });
      written += text.length + 2;
    };
    before.forEach((asked, index) => {
      if (asked.answers.length === 0) return;
      ask(asked, index);
      messages.push({ role: "assistant", content: asked.answers.at(-1).text });
      written += asked.answers.at(-1).text.length + 2;
    });
    ask(turn, before.length);
    const body = isChat() ? { messages } : { prompt: messages.map(message => message.content).join("\n\n") };
    return { body, parts };
  }
  const documentOf = source => turns[source.turn].documents[source.document];

  // How much of the context is taken: the conversation and what stands in the field.
  let wait = 0;
  function count() {
    clearTimeout(wait);
    counting?.abort();
    const draft = { documents: documents.current(), question: $("question").value };
    const nothing = turns.length === 0 && contentOf(draft).text === "";
    if (nothing || !documents.isCounted() || documents.problem() !== "") {
      $("count").textContent = "";
      return;
    }
    wait = setTimeout(async () => {
      counting = new AbortController();
      try {
        const found = await tokenize(promptOf(turns, draft).body, counting.signal);
        $("count").textContent = number(found.count) + " of " + number(found.max_model_len) + " tokens";
      } catch (error) {
        if (error.name !== "AbortError") $("count").textContent = "";
      }
    }, 250);
  }

  // --- what a turn looks like ---
  function addTurn(asked) {
    $("welcome").hidden = true;
    const turn = { ...asked, answers: [], element: make("article", "turn") };
    $("log").append(turn.element);
    turns.push(turn);
    drawQuestion(turn);
    return turn;
  }

  function drawQuestion(turn) {
    const asked = make("div", "asked"), chips = make("ul", "chips"), tools = make("div", "tools");
    if (turn.documents.length > 0) {
      chips.append(...turn.documents.map(makeChip));
      asked.append(chips);
    }
    asked.append(make("div", "question", turn.question));
    tools.append(makeButton("edit", "Edit", () => edit(turn)));
    asked.append(tools);
    turn.element.querySelector(".asked")?.remove();
    turn.element.prepend(asked);
  }

  // The question anew, and what came after it is gone.
  function edit(turn) {
    if (running) return;
    const form = make("form", "asked editing"), field = make("textarea"), row = make("div", "row");
    const submit = make("button", "strong", "Ask"), cancel = makeButton("", "Cancel", () => drawQuestion(turn));
    field.value = turn.question;
    field.setAttribute("aria-label", "Your question");
    field.rows = 3;
    const later = turns.length - 1 - turns.indexOf(turn);
    row.append(submit, cancel, make("span", "soft", later > 0
      ? "What follows it goes: " + later + (later === 1 ? " question." : " questions.") : ""));
    form.append(field, row);
    const ask = event => {
      event.preventDefault();
      if (running || field.value.trim() === "") return;
      for (const gone of turns.splice(turns.indexOf(turn) + 1)) gone.element.remove();
      for (const answer of turn.answers.splice(0)) answer.box.remove();
      turn.question = field.value.trim();
      drawQuestion(turn);
      reader.close();
      problem("");
      explore(null, true);
      for (const answer of turns.flatMap(one => one.answers)) explore(answer, true);
      askTurn(turn, [attentionSettings()]);
    };
    form.addEventListener("submit", ask);
    field.addEventListener("keydown", event => {
      if (event.key === "Escape") { drawQuestion(turn); event.stopPropagation(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
    });
    turn.element.querySelector(".asked").replaceWith(form);
    field.focus();
  }

  // Who answered, and how.
  const byLine = answer => (models().length > 1 || (answer.model && answer.model !== model()?.id)
    ? answer.model + ": " : "") + settingsLine(answer.measured ?? answer.settings);

  function addAnswer(turn, kept) {
    const answer = {
      model: model()?.id, text: "", thoughts: "", ids: [], promptIds: [], settings: {}, measured: null, usage: null,
      sources: [], line: "",
      ...kept, question: turn.question, documentOf, box: make("div", "card answer-card"), by: make("p", "by"),
      said: make("div", "said"), lineElement: make("p", "soft"), footer: make("footer"),
    };
    const { box, by, said, footer } = answer;
    by.textContent = byLine(answer);
    footer.append(answer.lineElement);
    box.append(by, said, footer);
    answer.markdown = createMarkdown(said);
    turn.element.append(box);
    return answer;
  }

  function drawThoughts(answer) {
    if (answer.thoughts === "") return;
    if (!answer.thoughtsElement) {
      const details = make("details", "thoughts");
      answer.thoughtsElement = make("div");
      details.append(make("summary", "", "Thoughts"), answer.thoughtsElement);
      answer.said.before(details);
    }
    answer.thoughtsElement.textContent = answer.thoughts;
  }

  // Once it is whole.
  function drawWhole(turn, answer) {
    const choose = (index, byKeyboard) => reader.open(answer, index, byKeyboard);
    answer.by.textContent = byLine(answer);
    answer.lineElement.textContent = answer.line;
    drawThoughts(answer);
    const cites = answer.sources.length > 0;
    answer.markdown.draw(answer.text, cites ? decorateAnswer(answer.text, answer.sources, choose) : null);
    if (cites) answer.said.after(makeSourceList(answer.sources, documentOf, choose));
    const tools = make("div", "tools");
    tools.append(
      makeButton("explore", "What it read", () => explore(answer)),
      makeCopyButton("copy", () => answer.text),
      makeButton("again", "Ask again", () => again(turn)));
    answer.footer.append(tools);
    rove(tools, "button", "Answer");
  }

  // Stays at the end while the answer grows, unless the reader has scrolled up.
  function follow(change) {
    const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  // --- asking ---
  async function askTurn(turn, ways) {
    for (const settings of ways) {
      if (!await ask(turn, settings)) break;
    }
    keep();
    count();
  }

  // False: it was stopped, or went wrong.
  async function ask(turn, settings) {
    const answer = addAnswer(turn, { settings }), begun = performance.now(), progress = createProgress();
    const since = () => (performance.now() - begun) / 1000;
    running = new AbortController();
    let first = 0, last = 0, share = 0, drawing = 0, seeksSources = false;
    answer.box.setAttribute("aria-busy", "true");  // a screen reader waits until the answer is whole
    answer.footer.prepend(progress.element);
    const live = () => {
      progress.draw();
      progress.element.hidden = first > 0;
      if (first === 0) return;
      const speed = (answer.ids.length - 1) / (last - first);
      answer.line = "first token " + seconds(first) + " s · " + number(answer.ids.length) + " tokens" +
        (answer.ids.length > 1 ? " · " + speed.toFixed(1) + " tokens/s" : "") + " · " + percent(share) + " read";
      // Nothing tells when the answer has ended and its sources are sought, but that no token comes any more.
      const seeks = seeksSources && since() - last > Math.max(1, SILENT / speed);
      answer.lineElement.textContent = answer.line + (seeks ? " · looking for its sources" : "");
    };
    const draw = () => {
      drawing = 0;
      follow(() => {
        drawThoughts(answer);
        answer.markdown.draw(answer.text);
      });
    };
    const ticking = setInterval(live, 200);
    showRunning(true);
    live();
    answer.box.scrollIntoView({ block: "nearest" });
    let trouble = null;
    try {
      const { body, parts } = promptOf(turns.slice(0, turns.indexOf(turn)), turn);
      seeksSources = parts.length > 0 && wantsSources();
      const sources = seeksSources ? { sources: true } : {};
      Object.assign(body, answerSettings(isChat()), { phsa: { ...settings, progress: true, ...sources },
        return_token_ids: true });
      for await (const chunk of stream(isChat() ? "v1/chat/completions" : "v1/completions", body, running.signal)) {
        if (chunk.phsa?.prefill) {
          progress.take(chunk.phsa.prefill);
          continue;
        }
        const [choice] = chunk.choices;
        if (chunk.phsa) answer.measured = chunk.phsa;
        answer.usage = chunk.usage ?? answer.usage;
        if (!choice) continue;
        share = choice.phsa?.read_share ?? share;
        if (choice.prompt_token_ids) answer.promptIds = choice.prompt_token_ids;
        if (choice.token_ids?.length > 0) {
          last = since();
          if (first === 0) first = last;
        }
        answer.ids.push(...(choice.token_ids ?? []));
        answer.thoughts += choice.delta?.reasoning_content ?? "";
        answer.text += choice.delta?.content ?? choice.text ?? "";
        // Whatever the tokens' speed: drawn once a frame, or now and then where nobody looks.
        drawing ||= setTimeout(draw, 30);
      }
      const { sources: found, ...measured } = answer.measured;
      answer.measured = measured;
      answer.sources = locateSources(found ?? [], parts, answer.text);
    } catch (error) {
      trouble = error;
      answer.measured = null;
    }
    clearTimeout(drawing);
    clearInterval(ticking);
    running = null;
    answer.box.setAttribute("aria-busy", "false");
    showRunning(false);
    live();
    progress.element.remove();
    return finish(turn, answer, trouble);
  }

  function finish(turn, answer, trouble) {
    const stopped = trouble?.name === "AbortError";
    if (trouble && !stopped) {
      problem(trouble.message);
      failed(trouble);
    }
    if (answer.ids.length === 0 && trouble) {
      // Nothing was said: the question goes back to where it was asked.
      answer.box.remove();
      if (turn.answers.length > 0) return false;
      turn.element.remove();
      turns.splice(turns.indexOf(turn), 1);
      $("welcome").hidden = turns.length > 0;
      if ($("question").value === "") $("question").value = turn.question;
      if (documents.current().length === 0) documents.set(turn.documents);
      return false;
    }
    turn.answers.push(answer);
    if (answer.measured) {
      answer.line = measuredLine(answer.measured);
      addMeasured(turn, answer);
    } else {
      answer.line += stopped ? " · stopped" : " · broken off";
    }
    if (answer.measured?.sources_error) answer.line += " · no sources: " + answer.measured.sources_error;
    $("said").textContent = "Answer " + (answer.measured ? "complete" : "stopped") + ": " + answer.line;
    follow(() => drawWhole(turn, answer));
    explore(answer, true);
    return !trouble;
  }

  function again(turn) {
    if (running) return;
    problem("");
    askTurn(turn, [attentionSettings()]);
  }

  function showRunning(is) {
    $("send").hidden = $("send-all").hidden = is;
    $("stop").hidden = !is;
    $("new").disabled = is;
    document.body.classList.toggle("running", is);
    if (document.activeElement === document.body) $(is ? "stop" : "question").focus({ preventScroll: true });
  }

  function send(ways) {
    const question = $("question").value.trim(), attached = documents.current();
    if (running) return;
    if (question === "") return problem(attached.length > 0 ? "Ask something about it." : "Ask something.");
    if (documents.problem() !== "") return problem(documents.problem());
    problem("");
    $("question").value = "";
    const turn = addTurn({ documents: attached, question });
    documents.set([]);
    askTurn(turn, ways);
  }

  // --- keeping ---
  async function keep() {
    if (turns.length === 0) return;
    const kept = turns.map(({ documents: own, question, answers }) => ({
      documents: own, question,
      answers: answers.map(answer => Object.fromEntries(KEPT.map(name => [name, answer[name]]))),
    }));
    const wanted = id;
    try {
      await save({ id, title: turns[0].question.slice(0, TITLE), turns: kept });
      if (wanted === id) history.replaceState(null, "", "#" + id);
    } catch {
      // A browser that keeps nothing: the conversation lives as long as the page.
    }
  }

  function clear() {
    reader.close();
    for (const turn of turns.splice(0)) turn.element.remove();
    id = newId();
    history.replaceState(null, "", location.pathname);
    $("welcome").hidden = false;
    problem("");
    documents.clear();
    explore(null, true);
  }

  async function open(wanted) {
    let found = null;
    try {
      found = await load(wanted);
    } catch { /* as if it were not there */ }
    if (!found || running) return false;
    clear();
    id = found.id;
    history.replaceState(null, "", "#" + id);
    for (const { answers, ...asked } of found.turns) {
      const turn = addTurn(asked);
      for (const kept of answers) {
        const answer = addAnswer(turn, kept);
        turn.answers.push(answer);
        drawWhole(turn, answer);
        if (answer.measured) addMeasured(turn, answer);
        explore(answer, true);
      }
    }
    $("log").scrollTop = $("log").scrollHeight;
    count();
    return true;
  }

  $("composer").addEventListener("submit", event => {
    event.preventDefault();
    send([attentionSettings()]);
  });
  $("send-all").addEventListener("click", () => send(ALL.map(name => attentionSettings(name))));
  $("question").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send([attentionSettings()]);
  });
  $("question").addEventListener("input", count);
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || $("chat").hidden || document.querySelector("dialog[open]")) return;
    if (running) running.abort(); else reader.close();
  });
  $("new").addEventListener("click", () => {
    clear();
    $("question").focus();
  });
  return {
    problem, open, count, clear, recount: documents.recount, isOpen: wanted => wanted === id,
    isRunning: () => running !== null,
  };
}
