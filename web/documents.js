// The documents that go with the next question: dropped, chosen or pasted. The server makes text of files.
import { make, makeButton, number } from "./explorer.js";
import { readDocument, tokenize } from "./api.js";

const $ = id => document.getElementById(id);
const MOST_BYTES = 64 << 20;  // of a file, as the server allows
// A paste longer than this is a document, not a question.
const PASTED = 2000;
// Tokens are counted in pieces, because the server takes bodies up to a limit.
const PIECE = 1 << 19;

async function countTokens(text, signal) {
  let count = 0;
  for (let at = 0; at < text.length;) {
    // At a line's end, so that no token is cut.
    const cut = text.lastIndexOf("\n", at + PIECE);
    const end = at + PIECE >= text.length ? text.length : cut > at ? cut : at + PIECE;
    count += (await tokenize({ content: text.slice(at, end) }, signal)).count;
    at = end;
  }
  return count;
}

// White space around a text is not sent; places move with what is before it.
function trimmed({ name, text, unit, places }) {
  const before = text.length - text.trimStart().length;
  return {
    name, text: text.trim(), unit,
    places: (places ?? []).map(place => [Math.max(0, place.start_utf16 - before), place.number]),
  };
}

// "page 3": where this character of a document stands in the original.
export function placeOf(document, at) {
  const { places, unit } = document;
  if (!places?.length) return "line " + document.text.slice(0, at).split("\n").length;
  let low = 0;
  for (let high = places.length - 1; low < high;) {
    const middle = Math.ceil((low + high) / 2);
    if (places[middle][0] <= at) low = middle; else high = middle - 1;
  }
  return unit + " " + places[low][1];
}

// What a turn says, and where in it each document stands: [begin, document]. Several are told apart by their names.
export function contentOf({ documents, question }) {
  let text = "";
  const parts = [];
  for (const document of documents) {
    if (documents.length > 1) text += "File: " + document.name + "\n\n";
    parts.push([text.length, document]);
    text += document.text + "\n\n";
  }
  return { text: text + question, parts };
}

export function makeChip(document) {
  const chip = make("li", "chip");
  chip.append(make("span", "name", document.name), make("span", "soft tokens",
    document.tokens === undefined ? "counting…" : number(document.tokens) + " tokens"));
  return chip;
}

// context(): the tokens that the model takes; problem(text): tells the user, "" nothing; changed(): they are others.
export function createDocuments({ context, problem, failed, changed }) {
  let current = [];
  const reading = new Set();  // {name, stop} of files that the server makes text of

  const sum = () => current.reduce((tokens, document) => tokens + (document.tokens ?? 0), 0);
  const isTooLong = () => sum() >= context();
  const names = () => current.map(document => document.name).join(" and ");
  const tooLong = () => names() + (current.length > 1 ? " have " : " has ") + number(sum()) +
    " tokens, and the model takes " + number(context()) + " with the question and the answer; leave some of it out.";

  function makeRemove(name, remove) {
    const button = makeButton("remove", "×", () => { remove(); $("question").focus(); });
    button.setAttribute("aria-label", "Remove " + name);
    return button;
  }
  function show() {
    const chips = current.map(document => {
      const chip = makeChip(document);
      chip.classList.toggle("long", isTooLong());
      chip.append(makeRemove(document.name, () => {
        current = current.filter(one => one !== document);
        problem("");
        told();
      }));
      return chip;
    });
    for (const file of reading) {
      const chip = make("li", "chip");
      chip.append(make("span", "name", file.name), make("span", "soft", "reading…"),
        makeRemove(file.name, () => file.stop.abort()));
      chips.push(chip);
    }
    $("documents").replaceChildren(...chips);
    $("documents").hidden = chips.length === 0;
  }
  function told() {
    show();
    changed();
  }

  async function add(document) {
    current = [...current, document];
    problem("");
    await count(document);
  }
  async function count(document) {
    told();
    try {
      document.tokens = await countTokens(document.text);
    } catch (error) {
      problem(error.message);
      failed(error);
    }
    told();
    if (current.includes(document) && isTooLong()) problem(tooLong());
  }

  async function take(file) {
    if (file.size > MOST_BYTES) {
      return problem(file.name + " has " + number(file.size) + " bytes; allowed: " + number(MOST_BYTES) + ".");
    }
    const mine = { name: file.name, stop: new AbortController() };
    reading.add(mine);
    told();
    try {
      let bytes;
      try {
        bytes = await file.arrayBuffer();
      } catch {
        return problem(file.name + " cannot be read; of a folder, drop the files.");
      }
      const found = trimmed(await readDocument(file.name, bytes, mine.stop.signal));
      reading.delete(mine);
      await add(found);
    } catch (error) {
      if (error.name === "AbortError") return;
      problem(error.message);
      failed(error);
    } finally {
      reading.delete(mine);
      told();
    }
  }
  async function takeAll(files) {
    for (const file of files) await take(file);  // in the order in which they were given
  }
  const takeText = (name, text) => {
    if (text.trim() !== "") add(trimmed({ name, text }));
  };

  $("document-choose").addEventListener("click", () => $("document-file").click());
  $("document-file").addEventListener("change", event => {
    takeAll([...event.target.files]);
    event.target.value = "";  // the same file may be chosen again
  });
  $("question").addEventListener("paste", event => {
    const files = [...event.clipboardData.files], text = event.clipboardData.getData("text");
    if (files.length === 0 && text.length <= PASTED) return;
    event.preventDefault();
    if (files.length > 0) takeAll(files); else takeText("pasted text", text);
  });

  const draggedOver = shown => { $("drop").hidden = !shown; };
  const takes = event => [...event.dataTransfer.types].some(type => type === "Files" || type === "text/plain");
  window.addEventListener("dragover", event => {
    if (!takes(event)) return;
    event.preventDefault();
    draggedOver(true);
  });
  window.addEventListener("dragleave", event => { if (!event.relatedTarget) draggedOver(false); });
  window.addEventListener("drop", event => {
    draggedOver(false);
    if (!takes(event)) return;
    event.preventDefault();
    const files = [...event.dataTransfer.files], text = event.dataTransfer.getData("text/plain");
    if (files.length > 0) takeAll(files); else takeText("dropped text", text);
  });

  return {
    current: () => current,
    // Put back where a question was refused, or none.
    set: documents => { current = documents; told(); },
    clear() {
      for (const file of reading) file.stop.abort();
      current = [];
      told();
    },
    // Another model has other tokens.
    recount() {
      problem("");
      for (const document of current) {
        document.tokens = undefined;
        count(document);
      }
    },
    isCounted: () => reading.size === 0 && current.every(document => document.tokens !== undefined),
    // Why a question cannot be asked now; "": it can.
    problem: () => reading.size > 0 ? "A document is still being read." : isTooLong() ? tooLong() : "",
  };
}
