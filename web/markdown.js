// Markdown as elements: paragraphs, headings, lists, quotations, tables, code, emphasis and links. What a model says
// only ever becomes text nodes; no HTML is parsed, no picture is loaded, and a link leads to http, https or mailto.
import { make, makeButton } from "./explorer.js";

const DEEPEST = 8;  // of blocks or emphasis within each other: beyond it is plain text
const LINK = /!?\[([^[\]\n]*)\]\(<?([^\s()<>]+)>?(?: +"[^"\n]*")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>()[\]"'`*]+[^\s<>()[\]"'`*.,;:!?]/y;
const FENCE = /^( {0,3})(`{3,}|~{3,}) *([^\s`]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})(?: +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/, QUOTE = /^ {0,3}> ?/, ROW = /^ {0,3}\|?[^|\n]*\|/;
const DIVIDER = /^ {0,3}\|?( *:?-+:? *\|)* *:?-+:? *\|? *$/;

const isAllowed = address => /^(https?:\/\/|mailto:)/i.test(address);

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", "unseen");  // without TLS, on another machine
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser does not let the page copy");
}

export function makeCopyButton(cls, text) {
  const button = makeButton(cls, "Copy", async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// Draws texts into `box`, each the last one with more at its end as long as `decorate` is not given: then what is there
// already stays. decorate(start, end, isCode) returns the nodes for text[start, end).
export function createMarkdown(box) {
  let drawn = [];  // {source, node} of the blocks of the outermost level
  let text = "", decorate = null;

  // A block's lines: {begin, end} in the text, without what precedes them (a quotation's mark, an item's indentation).
  const lineText = line => text.slice(line.begin, line.end);
  const linesOf = () => {
    const lines = [];
    for (let begin = 0; begin <= text.length;) {
      const found = text.indexOf("\n", begin), end = found < 0 ? text.length : found;
      lines.push({ begin, end });
      begin = end + 1;
    }
    return lines;
  };
  const isBlank = line => lineText(line).trim() === "";
  const indentOf = line => lineText(line).match(/^ */)[0].length;
  const cut = (line, count) => ({ begin: Math.min(line.end, line.begin + count), end: line.end });

  function emit(parent, begin, end, isCode = false) {
    if (begin < end) parent.append(...(decorate ? decorate(begin, end, isCode) : [text.slice(begin, end)]));
  }

  // --- within a block: the characters of some lines, and where each stands in the text ---
  function inline(parent, lines) {
    let flat = "";
    const begins = [];  // of each line: [in flat, in the text]
    for (const line of lines) {
      if (flat !== "") flat += "\n";
      const blank = lineText(line).length - lineText(line).trimStart().length;
      begins.push([flat.length, line.begin + blank]);
      flat += lineText(line).slice(blank).trimEnd();
    }
    const at = index => {
      let line = begins.length - 1;
      while (begins[line][0] > index) line--;
      return begins[line][1] + index - begins[line][0];
    };
    const put = (into, begin, end, isCode = false) => {
      for (let from = begin; from < end;) {
        const next = flat.indexOf("\n", from), to = next < 0 || next >= end ? end : next;
        if (to > from) emit(into, at(from), at(to - 1) + 1, isCode);
        if (to < end) into.append(make("br"));
        from = to + 1;
      }
    };
    const letter = index => index >= 0 && index < flat.length && /[\p{L}\p{N}]/u.test(flat[index]);
    const space = index => index < 0 || index >= flat.length || /\s/.test(flat[index]);

    // The end of what `mark` opens at `from`, or -1. An underscore within a word opens and closes nothing.
    function closing(mark, from, end) {
      if (space(from + mark.length) || (mark[0] === "_" && letter(from - 1))) return -1;
      for (let to = flat.indexOf(mark, from + mark.length + 1); to >= 0 && to < end; to = flat.indexOf(mark, to + 1)) {
        const run = flat[to + mark.length] === mark[0] && mark.length === 1;
        if (run) { to++; continue; }
        if (!space(to - 1) && flat[to - 1] !== "\\" && !(mark[0] === "_" && letter(to + mark.length))) return to;
      }
      return -1;
    }
    function parse(into, begin, end, depth) {
      let plain = begin;
      const flush = to => put(into, plain, to);
      for (let i = begin; i < end;) {
        const c = flat[i];
        if (c === "\\" && /[!-/:-@[-`{-~]/.test(flat[i + 1] ?? "")) {
          flush(i);
          plain = i + 1;
          i += 2;
          continue;
        }
        if (c === "`") {
          const run = flat.slice(i, end).match(/^`+/)[0].length;
          let to = i + run;
          while ((to = flat.indexOf("`".repeat(run), to)) >= 0 && flat[to + run] === "`") {
            while (flat[to] === "`") to++;
          }
          if (to >= 0 && to < end) {
            flush(i);
            const code = make("code");
            put(code, i + run, to, true);
            into.append(code);
            i = plain = to + run;
          } else {
            i += run;
          }
          continue;
        }
        if (depth < DEEPEST && (c === "*" || c === "_" || c === "~")) {
          const double = flat[i + 1] === c, mark = double ? c + c : c;
          const to = c === "~" && !double ? -1 : closing(mark, i, end);
          if (to >= 0) {
            flush(i);
            const element = make(c === "~" ? "del" : double ? "strong" : "em");
            parse(element, i + mark.length, to, depth + 1);
            into.append(element);
            i = plain = to + mark.length;
          } else {
            i += mark.length;
          }
          continue;
        }
        const link = c === "[" || c === "!" ? LINK : c === "h" && !letter(i - 1) ? ADDRESS : null;
        if (link) {
          link.lastIndex = i;
          const found = link.exec(flat);
          const address = found && (link === LINK ? found[2] : found[0]);
          if (found && link.lastIndex <= end && isAllowed(address)) {
            flush(i);
            const anchor = make("a");
            anchor.href = address;
            anchor.title = address;
            anchor.target = "_blank";
            anchor.rel = "noopener noreferrer nofollow";
            const from = link === LINK ? i + found[0].indexOf("[") + 1 : i;
            put(anchor, from, from + (link === LINK ? found[1] : found[0]).length);
            into.append(anchor);
            i = plain = i + found[0].length;
            continue;
          }
        }
        i++;
      }
      flush(end);
    }
    parse(parent, 0, flat.length, 0);
  }

  // --- blocks ---
  function codeBlock(lines, language) {
    const box = make("div", "code"), head = make("div", "code-head"), pre = make("pre"), code = make("code");
    const content = lines.map(lineText).join("\n");
    head.append(make("span", "soft", language || "code"), makeCopyButton("", () => content));
    lines.forEach((line, i) => {
      emit(code, line.begin, line.end, true);
      if (i + 1 < lines.length) code.append("\n");
    });
    pre.tabIndex = -1;
    pre.append(code);
    box.append(head, pre);
    return box;
  }

  function cellsOf(line) {
    const cells = [];
    let { begin } = line;
    const content = lineText(line);
    for (let i = 0; i <= content.length; i++) {
      if (i < content.length && (content[i] !== "|" || content[i - 1] === "\\")) continue;
      cells.push({ begin, end: line.begin + i });
      begin = line.begin + i + 1;
    }
    if (cells.length > 1 && isBlank(cells[0])) cells.shift();
    if (cells.length > 1 && isBlank(cells.at(-1))) cells.pop();
    return cells;
  }
  function table(lines) {
    const scroll = make("div", "table"), element = make("table"), columns = cellsOf(lines[0]).length;
    lines.forEach((line, i) => {
      if (i === 1) return;
      const row = make("tr");
      for (const cell of cellsOf(line).slice(0, columns)) {
        const box = make(i === 0 ? "th" : "td");
        inline(box, [cell]);
        row.append(box);
      }
      element.append(row);
    });
    scroll.append(element);
    return scroll;
  }

  function list(lines, depth) {
    const first = lineText(lines[0]).match(ITEM), ordered = /\d/.test(first[2]);
    const element = make(ordered ? "ol" : "ul");
    if (ordered && Number.parseInt(first[2], 10) !== 1) element.start = Number.parseInt(first[2], 10);
    for (let i = 0; i < lines.length;) {
      const found = lineText(lines[i]).match(ITEM), inside = found[0].length;
      const own = [cut(lines[i], inside)];
      for (i++; i < lines.length; i++) {
        const next = lineText(lines[i]).match(ITEM);
        if (next && next[1].length <= found[1].length + 1) break;
        own.push(cut(lines[i], Math.min(indentOf(lines[i]), inside)));
      }
      while (own.length > 1 && isBlank(own.at(-1))) own.pop();
      const item = make("li");
      // One that is a paragraph alone stands close to the next.
      const parts = blocks(own, depth + 1);
      for (const part of parts) {
        if (part.node.tagName === "P" && !own.some(isBlank)) item.append(...part.node.childNodes);
        else item.append(part.node);
      }
      element.append(item);
    }
    return element;
  }

  // {begin, end, node} of each; `draw`: false for those whose nodes are there already.
  function blocks(lines, depth, drawnBefore = () => null) {
    const found = [];
    const add = (from, to, draw) => {
      const begin = lines[from].begin, { end } = lines[to - 1];
      found.push({ begin, end, node: drawnBefore(found.length, text.slice(begin, end)) ?? draw() });
      return to;
    };
    for (let i = 0; i < lines.length;) {
      const content = lineText(lines[i]);
      if (content.trim() === "") { i++; continue; }
      const fence = content.match(FENCE), heading = content.match(HEADING);
      let to = i + 1;
      if (fence) {
        const close = new RegExp("^ {0,3}" + fence[2][0] + "{" + fence[2].length + ",} *$");
        while (to < lines.length && !close.test(lineText(lines[to]))) to++;
        const inside = lines.slice(i + 1, to).map(line => cut(line, Math.min(indentOf(line), fence[1].length)));
        i = add(i, Math.min(to + 1, lines.length), () => codeBlock(inside, fence[3]));
      } else if (heading) {
        const line = cut(lines[i], heading[0].length);
        const tail = lineText(line).match(/(^| +)#+ *$/);
        if (tail) line.end -= tail[0].length;
        i = add(i, to, () => {
          const element = make("h" + Math.min(6, heading[1].length + 2));
          inline(element, [line]);
          return element;
        });
      } else if (RULE.test(content)) {
        i = add(i, to, () => make("hr"));
      } else if (QUOTE.test(content) && depth < DEEPEST) {
        while (to < lines.length && !isBlank(lines[to]) && (QUOTE.test(lineText(lines[to])))) to++;
        const inside = lines.slice(i, to).map(line => cut(line, lineText(line).match(QUOTE)[0].length));
        i = add(i, to, () => {
          const element = make("blockquote");
          element.append(...blocks(inside, depth + 1).map(part => part.node));
          return element;
        });
      } else if (ITEM.test(content) && depth < DEEPEST) {
        const kind = /\d/.test(content.match(ITEM)[2]), outer = indentOf(lines[i]);
        const goesOn = line => {
          const item = lineText(line).match(ITEM);
          return item ? indentOf(line) > outer + 1 || /\d/.test(item[2]) === kind : indentOf(line) > outer;
        };
        for (; to < lines.length; to++) {
          if (!isBlank(lines[to])) {
            const lazy = !isBlank(lines[to - 1]) && !startsBlock(lineText(lines[to]));
            if (goesOn(lines[to]) || lazy) continue;
            break;
          }
          if (to + 1 >= lines.length || isBlank(lines[to + 1]) || !goesOn(lines[to + 1])) break;
        }
        const inside = lines.slice(i, to);
        i = add(i, to, () => list(inside, depth));
      } else if (to < lines.length && ROW.test(content) && DIVIDER.test(lineText(lines[to])) &&
                 lineText(lines[to]).includes("|")) {
        while (to < lines.length && lineText(lines[to]).includes("|")) to++;
        const inside = lines.slice(i, to);
        i = add(i, to, () => table(inside));
      } else {
        while (to < lines.length && !isBlank(lines[to]) && !startsBlock(lineText(lines[to]))) to++;
        const inside = lines.slice(i, to);
        i = add(i, to, () => {
          const element = make("p");
          inline(element, inside);
          return element;
        });
      }
    }
    return found;
  }
  const startsBlock = content => FENCE.test(content) || HEADING.test(content) || RULE.test(content) ||
    QUOTE.test(content) || ITEM.test(content);

  return {
    draw(whole, decorateWith = null) {
      if (decorate || decorateWith) {
        drawn = [];
        box.replaceChildren();
      }
      text = whole;
      decorate = decorateWith;
      const before = drawn;
      const found = blocks(linesOf(), 0, (i, source) => before[i]?.source === source ? before[i].node : null);
      drawn = found.map(({ begin, end, node }) => ({ source: text.slice(begin, end), node }));
      drawn.forEach(({ node }, i) => {
        if (box.childNodes[i] !== node) box.insertBefore(node, box.childNodes[i] ?? null);
      });
      while (box.childNodes.length > drawn.length) box.lastChild.remove();
    },
  };
}
