// The document that goes with the next question: dropped, chosen or pasted.
import { number } from "./explorer.js";
import { tokenize } from "./api.js";

const $ = id => document.getElementById(id);
// A file larger than this is no text that a model can read; it is not even opened.
const MOST_BYTES = 16 << 20;
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

// context: how many tokens the model takes; problem(text): says what is wrong; changed(): there is another document.
export function createDocuments({ context, problem, changed }) {
  let current = null, counting = null;

  function show() {
    $("document").hidden = !current;
    if (!current) return;
    $("document-name").textContent = current.name;
    $("document-tokens").textContent = current.tokens === undefined ? "counting…" : number(current.tokens) + " tokens";
    $("document").classList.toggle("long", isTooLong());
  }
  const isTooLong = () => current?.tokens >= context();
  const tooLong = () => current.name + " has " + number(current.tokens) + " tokens, and the model takes " +
    number(context()) + " with the question and the answer; leave some of it out.";

  async function set(name, text) {
    counting?.abort();
    counting = new AbortController();
    current = text.trim() === "" ? null : { name, text: text.trim() };
    show();
    problem(current || !name ? "" : name + " is empty.");
    changed();
    if (!current) return;
    const mine = current;
    try {
      mine.tokens = await countTokens(mine.text, counting.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      problem(error.message);
    }
    show();
    if (isTooLong()) problem(tooLong());
    changed();
  }

  async function take(file) {
    if (file.size > MOST_BYTES) {
      return problem(file.name + " has " + number(file.size) + " bytes; allowed: a text of at most " +
        number(MOST_BYTES) + ".");
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch (error) {
      return problem(error instanceof TypeError ? file.name + " is not a text in UTF-8; save it as plain text."
        : file.name + " cannot be read.");
    }
    if (text.includes("\0")) return problem(file.name + " is not a text; save it as plain text.");
    await set(file.name, text);
  }
  const remove = () => set("", "");

  $("document-choose").addEventListener("click", () => $("document-file").click());
  $("document-file").addEventListener("change", event => {
    if (event.target.files[0]) take(event.target.files[0]);
    event.target.value = "";  // the same file may be chosen again
  });
  $("document-remove").addEventListener("click", () => { remove(); $("question").focus(); });
  $("question").addEventListener("paste", event => {
    const [file] = event.clipboardData.files, text = event.clipboardData.getData("text");
    if (!file && text.length <= PASTED) return;
    event.preventDefault();
    if (file) take(file); else set("pasted text", text);
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
    const [file] = event.dataTransfer.files, text = event.dataTransfer.getData("text/plain");
    if (file) take(file); else if (text) set("dropped text", text);
  });

  return {
    current: () => current,
    // Put back where a question was refused, or none.
    restore: document => { current = document; show(); changed(); },
    remove,
    isCounted: () => !current || current.tokens !== undefined,
    problem: () => isTooLong() ? tooLong() : "",
  };
}
