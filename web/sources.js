// Where an answer was read from: its sentences lead to passages of the documents, those to the words that used them.
import { make, makeButton, percent, rove } from "./explorer.js";
import { placeOf } from "./documents.js";

const $ = id => document.getElementById(id);
const CITED = 3;  // passages that a sentence leads to, at most

// What the server found for an answer's text, in the documents of the conversation. parts: where each of those stands in
// the request, [{begin, end, message, turn, document}]; a document is named by its index in its turn.
export function locateSources(found, parts, answer) {
  const sources = [];
  for (const source of found) {
    const part = parts.find(one => one.message === source.message && one.begin <= source.start_utf16 &&
      source.end_utf16 <= one.end);
    if (!part) continue;  // of an earlier question, not of a document
    sources.push({
      turn: part.turn, document: part.document, begin: source.start_utf16 - part.begin,
      end: source.end_utf16 - part.begin, weight: source.weight,
      usedBy: source.used_by.map(use => {
        const words = answer.slice(use.start_utf16, use.end_utf16);  // a token begins with the blank before its word
        return { begin: use.end_utf16 - words.trimStart().length, end: use.end_utf16, weight: use.weight };
      }),
    });
  }
  return sources;
}

function sentencesOf(whole) {
  // A line break within a paragraph ends no sentence.
  const text = whole.replace(/([^\n])\n(?![\n\-*+#>|\d`])/g, "$1 ");
  if (!Intl.Segmenter) return [...text.matchAll(/[^.!?\n]+[.!?]*\s*/g)].map(m => [m.index, m.index + m[0].length]);
  const segments = new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text);
  return [...segments].map(({ index, segment }) => [index, index + segment.trimEnd().length]);
}

// The passages of each sentence that has any: {end, sources: their indexes, the heaviest first}.
function citationsOf(text, sources) {
  const citations = [];
  for (const [begin, end] of sentencesOf(text)) {
    const used = sources.map((source, index) => {
      const inside = source.usedBy.filter(use => use.begin < end && use.end > begin);
      return { index, weight: source.weight * inside.reduce((sum, use) => sum + use.weight, 0) };
    }).filter(use => use.weight > 0);
    used.sort((a, b) => b.weight - a.weight);
    if (used.length > 0) citations.push({ end, sources: used.slice(0, CITED).map(use => use.index) });
  }
  return citations;
}

// For the Markdown of an answer: words that used a passage stand in elements that name it, and behind each sentence are
// buttons that choose one. choose(index) is called for the passage of that index.
export function decorateAnswer(text, sources, choose) {
  const citations = citationsOf(text, sources);
  const cuts = new Set(citations.map(one => one.end));
  for (const source of sources) {
    for (const use of source.usedBy) cuts.add(use.begin).add(use.end);
  }
  const borders = [...cuts].sort((a, b) => a - b);
  // into: the sentence before ended at the same place.
  const cite = (ending, into) => {
    const box = into ?? make("sup", "cites"), there = [...box.children].map(button => Number(button.textContent) - 1);
    for (const index of new Set(ending.flatMap(one => one.sources))) {
      if (there.includes(index)) continue;
      const button = makeButton("cite", index + 1, () => choose(index));
      button.tabIndex = -1;  // the list below the answer has the same, for the keyboard
      button.setAttribute("aria-label", "Source " + (index + 1));
      box.append(button);
    }
    return box;
  };
  const endingAt = at => citations.splice(0, citations.filter(one => one.end <= at).length);
  let before = null;  // the last node of text
  return (begin, end, isCode) => {
    // Sentences that end with what is no text, as the end of emphasis, or in code.
    const late = isCode ? [] : endingAt(begin);
    const nodes = [];
    if (late.length > 0) {
      if (before?.classList.contains("cites")) cite(late, before);
      else if (before) before.after(cite(late));
      else nodes.push(cite(late));
    }
    for (let at = begin; at < end;) {
      const to = borders.find(border => border > at && border < end) ?? end;
      const used = sources.flatMap((source, i) =>
        source.usedBy.some(use => use.begin <= at && use.end >= to) ? [i] : []);
      const piece = make("span", used.length > 0 ? "used" : "", text.slice(at, to));
      if (used.length > 0) piece.dataset.sources = " " + used.join(" ") + " ";
      nodes.push(piece);
      const ending = isCode ? [] : endingAt(to);
      if (ending.length > 0) nodes.push(cite(ending));
      if (!isCode) before = nodes.at(-1);
      at = to;
    }
    return nodes;
  };
}

// The document beside the answer.
export function createReader() {
  let shown = null, marks = [];  // {answer, box, sources, index}

  function light(box, index) {
    for (const word of box.querySelectorAll(".used")) {
      word.classList.toggle("lit", index !== null && word.dataset.sources.includes(" " + index + " "));
    }
    for (const item of box.querySelectorAll(".source")) {
      item.setAttribute("aria-pressed", Number(item.dataset.index) === index);
    }
  }
  function close() {
    if (!shown) return;
    const back = $("reader").contains(document.activeElement) && shown.box.querySelector(".source[aria-pressed=true]");
    light(shown.box, null);
    shown = null;
    marks = [];
    $("reader").hidden = true;
    if (back) back.focus({ preventScroll: true });
    $("reader-text").replaceChildren();
    document.body.classList.remove("reads");
  }

  function draw(text, own) {
    const nodes = [];
    let at = 0;
    marks = [];
    for (const [source, index] of own.sort((a, b) => a[0].begin - b[0].begin)) {
      if (source.begin < at) continue;  // passages do not overlap; a stored one might
      nodes.push(text.slice(at, source.begin));
      const mark = make("mark", "", text.slice(source.begin, source.end));
      mark.setAttribute("role", "button");
      mark.dataset.number = index + 1;
      mark.dataset.index = index;
      mark.addEventListener("click", () => choose(index, "answer"));
      mark.addEventListener("keydown", event => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(index, "answer");
      });
      nodes.push(mark);
      marks.push(mark);
      at = source.end;
    }
    nodes.push(text.slice(at));
    $("reader-text").replaceChildren(...nodes);
    rove($("reader-text"), "mark", "Passages");
  }

  // scrollTo: "document" brings the passage into view, "answer" its words.
  function choose(index, scrollTo) {
    const { box, sources, documentOf } = shown, source = sources[index], found = documentOf(source);
    if (shown.document !== found) {
      shown.document = found;
      $("reader-name").textContent = found.name;
      draw(found.text, sources.map((one, i) => [one, i]).filter(([one]) => documentOf(one) === found));
    }
    const mark = marks.find(one => Number(one.dataset.index) === index);
    for (const one of marks) one.setAttribute("aria-pressed", one === mark);
    light(box, index);
    const words = box.querySelectorAll(".lit").length;
    $("reader-note").textContent = "Passage " + (index + 1) + " of " + sources.length + ", " +
      placeOf(found, source.begin) + ", " + percent(source.weight) + " of what counts" +
      (words > 0 ? "; its words in the answer are underlined." : "; no word of the answer stands out.");
    const target = scrollTo === "answer" ? box.querySelector(".lit") : mark;
    target?.scrollIntoView({ block: scrollTo === "answer" ? "nearest" : "center" });
  }

  // takesFocus: who came by the keyboard goes on from the passage.
  function open(answer, index, takesFocus = false) {
    if (shown && shown.box !== answer.box) close();
    shown ??= { box: answer.box, sources: answer.sources, documentOf: answer.documentOf, document: null };
    $("reader").hidden = false;
    document.body.classList.add("reads");
    choose(index, "document");
    if (takesFocus) marks.find(mark => Number(mark.dataset.index) === index)?.focus();
  }

  $("reader-close").addEventListener("click", close);
  return { open, close };
}

// The list below an answer. choose(index, byKeyboard) is called for the passage of that index.
export function makeSourceList(sources, documentOf, choose) {
  const box = make("div", "sources"), title = make("span", "soft", "Sources"), list = make("ol");
  sources.forEach((source, index) => {
    const found = documentOf(source), item = make("li");
    const button = makeButton("source", undefined, event => choose(index, event.detail === 0));
    button.dataset.index = index;
    button.append(make("b", "", index + 1), make("span", "place", found.name + ", " + placeOf(found, source.begin)),
      make("span", "quote", found.text.slice(source.begin, source.end).replace(/\s+/g, " ")));
    item.append(button);
    list.append(item);
  });
  box.append(title, list);
  rove(list, ".source", "Sources");
  return box;
}
