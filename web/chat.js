// The conversation, kept in this page's memory alone.
import { make, makeButton, number, percent } from "./explorer.js";
import { stream, tokenize } from "./api.js";
import { answerSettings, attentionName, attentionSettings } from "./settings.js";
import { addMeasured, measuredLine, seconds } from "./comparison.js";
import { createDocuments } from "./documents.js";

const $ = id => document.getElementById(id);

const contentOf = ({ document, question }) => document ? document.text + "\n\n" + question : question;

function settingsLine({ attention, top_k: k }) {
  return attentionName(attention) + (k === undefined ? "" : ", K " + k);
}

// model(): what /v1/models says; failed(error): the key may be missing; explore(answer): shows what it read.
export function createChat({ model, failed, explore }) {
  const turns = [];  // {document, question, answers, element}; the last answer is the one that counts
  let running = null, counting = null;

  const problem = text => {
    $("problem").textContent = text;
    $("problem").hidden = text === "";
  };
  const documents = createDocuments({
    context: () => model()?.max_model_len ?? Infinity, problem, changed: () => count(),
  });

  // A model without a chat template goes on with the text as it is.
  const isChat = () => model()?.phsa.chat_template !== null;
  function promptOf(before, turn) {
    const messages = before.filter(t => t.answers.length > 0)
      .flatMap(t => [{ role: "user", content: contentOf(t) }, { role: "assistant", content: t.answers.at(-1).text }]);
    messages.push({ role: "user", content: contentOf(turn) });
    return isChat() ? { messages } : { prompt: messages.map(message => message.content).join("\n\n") };
  }

  // How much of the context is taken: the conversation and what stands in the field.
  let wait = 0;
  function count() {
    clearTimeout(wait);
    counting?.abort();
    const draft = { document: documents.current(), question: $("question").value };
    const nothing = turns.length === 0 && contentOf(draft) === "";
    if (nothing || !documents.isCounted() || documents.problem() !== "") {
      $("count").textContent = "";
      return;
    }
    wait = setTimeout(async () => {
      counting = new AbortController();
      try {
        const found = await tokenize(promptOf(turns, draft), counting.signal);
        $("count").textContent = number(found.count) + " of " + number(found.max_model_len) + " tokens";
      } catch (error) {
        if (error.name !== "AbortError") $("count").textContent = "";
      }
    }, 250);
  }

  function addTurn(document, question) {
    $("welcome").hidden = true;
    const element = make("article", "turn"), asked = make("div", "asked");
    if (document) {
      const chip = make("p", "chip");
      chip.append(make("span", "", document.name), make("span", "soft", number(document.tokens ?? 0) + " tokens"));
      asked.append(chip);
    }
    asked.append(make("div", "", question));
    element.append(asked);
    $("log").append(element);
    const turn = { document, question, answers: [], element };
    turns.push(turn);
    return turn;
  }

  function addAnswer(turn, settings) {
    const box = make("div", "card answer-card"), said = make("p", "said"), text = document.createTextNode("");
    const line = make("p", "soft"), footer = make("footer");
    box.setAttribute("aria-busy", "true");  // a screen reader waits until the answer is whole
    said.append(text);
    footer.append(line);
    box.append(make("p", "by", settingsLine(settings)), said, footer);
    turn.element.append(box);
    return { text: "", ids: [], promptIds: [], settings, question: turn.question, box, textNode: text, line, footer };
  }

  // Stays at the end while the answer grows, unless the reader has scrolled up.
  function follow(change) {
    const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  async function ask(turn) {
    const settings = attentionSettings(), answer = addAnswer(turn, settings), begun = performance.now();
    const since = () => (performance.now() - begun) / 1000;
    running = new AbortController();
    let first = 0, share = 0, measured = null, usage = null;
    const live = () => {
      const speed = (answer.ids.length - 1) / (since() - first);
      answer.line.textContent = first === 0 ? "reading, " + since().toFixed(1) + " s"
        : "first token " + seconds(first) + " s · " + number(answer.ids.length) + " tokens" +
          (answer.ids.length > 1 ? " · " + speed.toFixed(1) + " tokens/s" : "") + " · " + percent(share) + " read";
    };
    const ticking = setInterval(live, 200);
    showRunning(true);
    answer.box.scrollIntoView({ block: "nearest" });
    let trouble = null;
    try {
      const body = { ...promptOf(turns.slice(0, turns.indexOf(turn)), turn), ...answerSettings(), phsa: settings,
        return_token_ids: true };
      for await (const chunk of stream(isChat() ? "v1/chat/completions" : "v1/completions", body, running.signal)) {
        const [choice] = chunk.choices;
        measured = chunk.phsa ?? measured;
        usage = chunk.usage ?? usage;
        if (!choice) continue;
        share = choice.phsa?.read_share ?? share;
        if (choice.prompt_token_ids) answer.promptIds = choice.prompt_token_ids;
        if (choice.token_ids?.length > 0 && first === 0) first = since();
        answer.ids.push(...(choice.token_ids ?? []));
        const more = (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? choice.text ?? "");
        answer.text += more;
        follow(() => answer.textNode.appendData(more));
      }
    } catch (error) {
      trouble = error;
    }
    clearInterval(ticking);
    running = null;
    answer.box.setAttribute("aria-busy", "false");
    showRunning(false);
    finish(turn, answer, trouble, measured, usage, live);
    count();
  }

  function finish(turn, answer, trouble, measured, usage, live) {
    const stopped = trouble?.name === "AbortError";
    if (trouble && !stopped) {
      problem(trouble.message);
      failed(trouble);
    }
    if (answer.ids.length === 0 && trouble) {
      // Nothing was said: the question goes back to where it was asked.
      answer.box.remove();
      if (turn.answers.length > 0) return;
      turn.element.remove();
      turns.splice(turns.indexOf(turn), 1);
      $("welcome").hidden = turns.length > 0;
      if ($("question").value === "") $("question").value = turn.question;
      if (!documents.current() && turn.document) documents.restore(turn.document);
      return;
    }
    turn.answers.push(answer);
    if (measured) {
      answer.line.textContent = measuredLine(measured);
      answer.settings = { ...answer.settings, attention: measured.attention };
      addMeasured(measured, usage);
    } else {
      live();
      answer.line.textContent += stopped ? " · stopped" : " · broken off";
    }
    $("said").textContent = "Answer " + (measured ? "complete" : "stopped") + ": " + answer.line.textContent;
    follow(() => answer.footer.append(
      makeButton("explore", "What it read", () => explore(answer)),
      makeButton("again", "Ask again", () => again(turn))));
    explore(answer, true);
  }

  function again(turn) {
    if (running) return;
    problem("");
    ask(turn);
  }

  function showRunning(is) {
    $("send").hidden = is;
    $("stop").hidden = !is;
    $("new").disabled = is;
    if (document.activeElement === document.body) $(is ? "stop" : "question").focus({ preventScroll: true });
  }

  function send() {
    const question = $("question").value.trim(), document = documents.current();
    if (running) return;
    if (question === "") return problem(document ? "Ask something about the document." : "Ask something.");
    if (documents.problem() !== "") return problem(documents.problem());
    problem("");
    $("question").value = "";
    const turn = addTurn(document, question);
    documents.restore(null);
    ask(turn);
  }

  $("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("question").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("question").addEventListener("input", count);
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && running && !$("chat").hidden) running.abort();
  });
  $("new").addEventListener("click", () => {
    for (const turn of turns.splice(0)) turn.element.remove();
    $("welcome").hidden = false;
    problem("");
    documents.remove();
    explore(null, true);
    $("question").focus();
  });
  return { problem };
}
