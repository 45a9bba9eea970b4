// The explorer: which blocks of a text some queries read. Also part of the pages that `phsa inspect --html` writes,
// where a module cannot import another: so it imports nothing, and the helpers that other modules use too are here.

// Text only ever becomes text nodes.
export const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
export const makeButton = (cls, text, onClick) => {
  const button = make("button", cls, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
};
// One stop for the Tab key among `box`'s elements, the arrow keys move between them.
export function rove(box, selector, name) {
  const all = () => [...box.querySelectorAll(selector)].filter(e => !e.hidden && !e.disabled);
  const stopAt = element => { for (const e of all()) e.tabIndex = e === element ? 0 : -1; };
  stopAt(all().find(e => e.tabIndex === 0) ?? all()[0]);
  if (box.dataset.roves) return;
  box.dataset.roves = "yes";
  if (name && !box.hasAttribute("role") && box.tagName === "DIV") box.setAttribute("role", "group");
  if (name) box.setAttribute("aria-label", name);
  box.addEventListener("focusin", event => {
    const found = event.target.closest(selector);
    if (found) stopAt(found);
  });
  box.addEventListener("keydown", event => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }, elements = all();
    const at = elements.indexOf(event.target.closest(selector));
    if (at < 0 || !steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    elements[(at + steps[event.key] + elements.length) % elements.length].focus();
  });
}
export const number = n => n.toLocaleString("en-US");
export const percent = x => (100 * x).toFixed(1) + " %";

// Units of the data's integers, and how a layer of a query is packed:
// [kind, init end, local begin, recall of query heads, then [blocks, scores] of each head that chooses].
const SCORE = 1e-5, RECALL = 1e-4;
const CHOSEN = 0, ALL = 1, DENSE = 2, FIRST_HEAD = 4;

// The packed form of what /inspect answers.
export function packInspection(found) {
  const gaps = marks => marks.map((at, i) => at - (i > 0 ? marks[i - 1] : 0));
  const integers = (values, unit) => values.map(value => Math.round(value / unit));
  const layer = l => [
    !l.init ? DENSE : l.reads_all ? ALL : CHOSEN, l.init ? l.init[1] : 0, l.local ? l.local[0] : 0,
    l.heads.flatMap(head => integers(head.recall_by_query_head, RECALL)),
    ...l.heads.map(head => [head.blocks, integers(head.scores, SCORE)]),
  ];
  const { layers: own = {}, ...base } = found.attention;
  const policies = Array.from({ length: found.num_layers }, () => base.attention);
  for (const [range, settings] of Object.entries(own)) {  // "3" or "3-5"
    const [first, last = first] = range.split("-").map(Number);
    policies.fill(settings.attention ?? base.attention, first, last + 1);
  }
  return {
    model: found.model, attention: base, prompt: found.prompt_tokens, text: found.text,
    punctuation: gaps(found.punctuation), special: gaps(found.special), block: found.block_size,
    queryHeads: found.num_q_heads, recall: found.recall, readShare: found.read_share,
    layers: found.queries[0].layers.map((l, i) => ({ block: l.block_size, policy: policies[i] })),
    queries: found.queries.map(query => ({ at: query.position, layers: query.layers.map(layer) })),
  };
}

// Draws `data` into `root`. options:
//   title: an element, the heading; tools: an element for the top line
//   written: the tokens to choose from are those that the queries led to, not the queries themselves
//   view: what is shown at first: {query (its position in the text), layer, head, by: "score" or "count", block}
//   changed(view): called whenever that changes
export function createExplorer(root, data, options = {}) {
  const marks = gaps => { let at = 0; return new Set(gaps.map(gap => at += gap)); };
  const UNIT = data.block, LENGTH = data.text.length, BLOCKS = Math.ceil(LENGTH / UNIT);
  const LAYERS = data.layers.length, HEADS = data.queryHeads;
  const punctuation = marks(data.punctuation), special = marks(data.special);
  const settings = data.attention;
  const choosers = Math.max(...data.queries[0].layers.map(l => l.length - FIRST_HEAD));
  const byQueryHead = choosers === HEADS && settings.group_reduce === "none";
  const written = Boolean(options.written), tokenAt = query => query.at + (written ? 1 : 0);

  // What is shown. query -1, layer -1, head -1: all of them.
  const shown = { query: data.queries.length > 1 ? -1 : 0, layer: -1, head: -1, by: "score", pin: -1 };
  function setView(view) {
    const index = (value, count) => Number.isInteger(value) && value >= 0 && value < count ? value : -1;
    const query = data.queries.findIndex(q => q.at === view.query);
    if (query >= 0) shown.query = query;
    shown.layer = index(view.layer, LAYERS);
    shown.head = index(view.head, choosers);
    if (view.by === "count") shown.by = "count";
    shown.pin = index(view.block, BLOCKS);
  }
  function tell() {
    const some = index => index >= 0 ? index : undefined;
    options.changed?.({
      query: data.queries[shown.query]?.at, layer: some(shown.layer), head: some(shown.head), by: shown.by,
      block: some(shown.pin),
    });
  }

  const visible = s => {  // a token of white space alone can be seen
    const t = s.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
    return t.trim() === "" ? t.replace(/ /g, "␣") || "…" : t;
  };
  const snippet = block => data.text.slice(block * UNIT, (block + 1) * UNIT).join("").replace(/\s+/g, " ").trim();

  function eachHead(visit) {  // the choices that the controls ask for
    data.queries.forEach((query, qi) => {
      if (shown.query >= 0 && shown.query !== qi) return;
      query.layers.forEach((layer, li) => {
        if (shown.layer >= 0 && shown.layer !== li) return;
        const heads = layer.length - FIRST_HEAD;
        for (let h = 0; h < heads; h++) {
          // Layers may differ in who chooses: a head of the widest stands for the one it belongs to.
          if (shown.head >= 0 && Math.floor(shown.head * heads / choosers) !== h) continue;
          visit(query, layer, li, h, layer[FIRST_HEAD + h][0], layer[FIRST_HEAD + h][1], heads);
        }
      });
    });
  }

  function measure() {
    const count = new Float64Array(BLOCKS), score = new Float64Array(BLOCKS), read = new Uint8Array(BLOCKS);
    const init = new Uint8Array(BLOCKS), local = new Uint8Array(BLOCKS);
    let recall = 0, recalls = 0, tokens = 0, dense = 0, heads = 0, all = 0, last = 0;
    eachHead((query, layer, li, h, blocks, scores, inLayer) => {
      const ratio = data.layers[li].block / UNIT, own = Math.floor(query.at / UNIT);
      const initEnd = layer[1] * ratio, localBegin = layer[2] * ratio, group = HEADS / inLayer;
      last = Math.max(last, query.at);
      heads++;
      if (layer[0] !== CHOSEN) all++;
      if (layer[0] === DENSE) {
        read.fill(1, 0, own + 1);
        tokens += (query.at + 1) * group;
      } else {
        for (let b = 0; b < initEnd && b <= own; b++) init[b] = read[b] = 1;
        for (let b = localBegin; b <= own; b++) local[b] = read[b] = 1;
        const always = localBegin > own ? query.at + 1 : initEnd * UNIT + query.at + 1 - localBegin * UNIT;
        tokens += (always + blocks.length * ratio * UNIT) * group;
        blocks.forEach((block, i) => {
          for (let b = block * ratio; b < (block + 1) * ratio; b++) {
            count[b]++;
            score[b] += scores[i] * SCORE;
            read[b] = 1;
          }
        });
      }
      dense += (query.at + 1) * group;
      for (let q = h * group; q < (h + 1) * group; q++) { recall += layer[3][q] * RECALL; recalls++; }
    });
    return { count, score, read, init, local, recall: recall / recalls, share: tokens / dense, heads, all, last };
  }

  // --- once ---
  const ui = {}, cells = [], spans = [], tokens = [];
  const card = (cls, title, note) => {
    const box = make("section", "card " + cls), heading = make("h3", "", title + " ");
    heading.append(note);
    box.append(heading);
    return box;
  };

  function build() {
    root.replaceChildren();
    root.classList.add("explorer");
    root.classList.remove("pinned");
    const body = make("div", "body"), side = make("div", "side");
    ui.text = make("article", "card text");
    body.append(buildTools(), buildMap(), ui.text);
    ui.detail = make("section", "card detail");
    side.append(ui.detail, buildRecall(), buildTop());
    root.append(buildTopLine(), body, side);
    buildText();
  }

  function buildTopLine() {
    const parts = [settings.attention];
    if (settings.attention !== "streaming") parts.push("K " + settings.top_k);
    if (settings.parts > 1) parts.push(settings.parts + " parts");
    if (settings.attention === "phsa") parts.push("λ " + settings.lambda, "punctuation " + settings.punctuation);
    parts.push("init " + settings.init, "local " + settings.local, "blocks of " + settings.block);
    if (settings.dense_below) parts.push("dense below " + settings.dense_below);
    const line = make("header", "top-line"), about = make("div"), facts = make("dl", "facts");
    if (options.title) {
      options.title.classList.add("title");
      about.append(options.title);
    }
    about.append(make("p", "", data.model + " · " + parts.join(", ")));
    for (const [name, value] of [["recall", data.recall.toFixed(3)], ["tokens read", percent(data.readShare)],
      ["tokens", number(LENGTH)], ["blocks", number(BLOCKS)]]) {
      const box = make("div");
      box.append(make("dt", "", name), make("dd", "", value));
      facts.append(box);
    }
    line.append(about, facts);
    if (options.tools) line.append(options.tools);
    return line;
  }

  function buildTools() {
    ui.queriesNote = make("small");
    ui.queries = make("div", "queries");
    const box = card("tools-card", written ? "Answer token" : "Query token", ui.queriesNote);
    const tools = make("div", "tools");
    if (data.queries.length > 1) addQuery("all", -1);
    data.queries.forEach((query, i) => addQuery(visible(data.text[tokenAt(query)]), i, tokenAt(query) >= data.prompt));
    const select = (name, texts, change) => {
      const label = make("label", "", name + " "), list = make("select");
      [["all", -1], ...texts.map((text, i) => [text, i])].forEach(([text, value]) => list.add(new Option(text, value)));
      list.addEventListener("change", () => { change(Number(list.value)); draw(); });
      label.append(list);
      tools.append(label);
      return list;
    };
    ui.layer = select("Layer", data.layers.map((layer, l) =>
      l + (layer.policy === settings.attention ? "" : " (" + layer.policy + ")")), l => { shown.layer = l; });
    ui.head = select(byQueryHead ? "Query head" : "KV head", Array.from({ length: choosers }, (_, h) => String(h)),
      h => { shown.head = h; });
    const heat = make("span", "label", "Heat ");
    ui.measure = make("span", "switch");
    ui.measure.setAttribute("role", "group");
    ui.measure.setAttribute("aria-label", "Heat");
    for (const [by, text] of [["score", "score"], ["count", "how often"]]) {
      const button = makeButton("", text, () => { shown.by = by; draw(); });
      button.dataset.by = by;
      ui.measure.append(button);
    }
    heat.append(ui.measure);
    tools.append(heat);
    ui.status = make("p", "status");
    ui.status.setAttribute("role", "status");
    box.append(ui.queries, tools, ui.status);
    rove(ui.queries, "button", written ? "Answer token" : "Query token");
    rove(ui.measure, "button", "Heat");
    return box;
  }

  function addQuery(text, index, answer) {
    const button = makeButton(answer ? "answer" : "", text, () => { shown.query = index; draw(); });
    button.title = index < 0 ? "all of them together"
      : "token " + number(tokenAt(data.queries[index])) + (answer ? ", answer" : "");
    button.dataset.q = index;
    ui.queries.append(button);
  }

  function buildMap() {
    ui.mapNote = make("small", "", "of " + UNIT + " tokens, in the order of the text");
    ui.scaleNote = make("span");
    ui.map = make("div", "map");
    ui.map.classList.toggle("small", BLOCKS > 800);
    ui.map.tabIndex = 0;
    ui.map.setAttribute("role", "listbox");
    ui.map.setAttribute("aria-label", "Blocks; arrow keys move");
    const key = make("ul", "key");
    const item = (...parts) => { const li = make("li"); li.append(...parts); key.append(li); };
    item(make("i", "scale"), ui.scaleNote);
    item(make("i", "init"), "init, always read");
    item(make("i", "local"), "local, always read");
    item(make("span", "unread", "grey text"), "not read");
    item(make("b", "", "."), "punctuation");
    item(make("i", "asks"), written ? "answer token" : "query token");
    const box = card("map-card", "Blocks", ui.mapNote);
    box.append(ui.map, key);
    return box;
  }

  function buildText() {
    const asking = new Map(data.queries.map((query, i) => [tokenAt(query), i]));
    const map = document.createDocumentFragment(), text = document.createDocumentFragment();
    for (let b = 0; b < BLOCKS; b++) {
      const cell = make("i"), span = make("span");
      cell.dataset.b = span.dataset.b = b;
      cell.id = "block-" + b;
      cell.setAttribute("role", "option");
      for (let t = b * UNIT; t < Math.min(LENGTH, (b + 1) * UNIT); t++) {
        let string = data.text[t];
        if (t === b * UNIT && !asking.has(t)) {
          // White space before a block stays uncoloured: it shows where blocks meet, and ends no line with a stub.
          const rest = string.trimStart();
          text.append(string.slice(0, string.length - rest.length));
          string = rest;
        }
        const token = make("i", "", string);
        if (punctuation.has(t)) token.classList.add("p");
        if (special.has(t)) token.classList.add("c");
        if (asking.has(t)) {
          token.classList.add("q");
          if (data.text[t].trim() === "") token.dataset.blank = visible(data.text[t]);
          tokens[asking.get(t)] = token;
        }
        span.append(token);
      }
      cells.push(cell);
      spans.push(span);
      map.append(cell);
      text.append(span);
    }
    ui.map.append(map);
    ui.text.append(text);
  }

  function buildRecall() {
    const box = card("recall-card", "Recall", make("small", "", "share of dense attention's mass"));
    ui.recall = make("div", "grid recall");
    ui.recall.style.gridTemplateColumns = "repeat(" + LAYERS + ", minmax(0, 1fr))";
    for (let h = 0; h < HEADS; h++) {
      for (let l = 0; l < LAYERS; l++) {
        const cell = make("i", !byQueryHead && (h + 1) % (HEADS / choosers) === 0 && h + 1 < HEADS ? "seam" : "");
        cell.dataset.l = l;
        cell.dataset.h = h;
        ui.recall.append(cell);
      }
    }
    ui.recallNote = make("p", "note");
    box.append(ui.recall, axis("query heads from top to bottom"), ui.recallNote);
    return box;
  }

  function axis(text) {
    const line = make("div", "axis");
    line.append(make("span", "", "layer 0"), make("span", "", text), make("span", "", "layer " + (LAYERS - 1)));
    return line;
  }

  function buildTop() {
    ui.topNote = make("small");
    ui.top = make("ul", "top");
    const box = card("top-card", "Top blocks", ui.topNote);
    box.append(ui.top);
    return box;
  }

  // --- whenever a control changes ---
  let now = null;
  function draw() {
    now = measure();
    const value = shown.by === "count" ? now.count : now.score;
    let most = 0;
    for (let b = 0; b < BLOCKS; b++) most = Math.max(most, value[b]);
    now.value = value;
    now.most = most;
    const own = Math.floor(now.last / UNIT);
    for (let b = 0; b < BLOCKS; b++) {
      const hot = now.count[b] > 0, h = hot && most > 0 ? value[b] / most : 0;
      const kind = (now.init[b] ? " init" : now.local[b] ? " local" : "") + (hot ? " hot" : "") +
        (b > own ? " late" : "") + (b === shown.pin ? " pin" : "");
      spans[b].className = kind + (now.read[b] ? " read" : "");
      cells[b].className = kind;
      spans[b].style.setProperty("--h", h.toFixed(3));
      cells[b].style.setProperty("--h", h.toFixed(3));
    }
    tokens.forEach((token, i) => token.classList.toggle("asks", shown.query === i));
    for (const button of ui.queries.children) {
      button.setAttribute("aria-pressed", Number(button.dataset.q) === shown.query);
    }
    for (const button of ui.measure.children) button.setAttribute("aria-pressed", button.dataset.by === shown.by);
    ui.layer.value = shown.layer;
    ui.head.value = shown.head;
    drawStatus(own);
    drawRecall();
    drawTop();
    drawDetail(shown.pin);
    describe();
    tell();
  }

  function drawStatus(own) {
    const query = data.queries[shown.query];
    ui.queriesNote.textContent = !query ? number(data.queries.length) + " together"
      : written ? "written after “" + visible(data.text[query.at]) + "”, token " + number(query.at)
      : "at " + query.at + (query.at + 1 < LENGTH ? ", followed by “" + visible(data.text[query.at + 1]) + "”" : "");
    const different = now.count.reduce((sum, n) => sum + (n > 0), 0), before = own + 1;
    const parts = ["Recall ", make("b", "", now.recall.toFixed(3)), ", ", make("b", "", percent(now.share)),
      " of the tokens read. "];
    if (now.all === now.heads) {
      parts.push("Nothing is left out.");
    } else if (different === 0) {
      parts.push("Nothing is chosen: init and local blocks alone are read.");
    } else {
      parts.push(make("b", "", number(different)), " of " + number(before) + " blocks chosen by at least one of " +
        number(now.heads) + (now.heads === 1 ? " head." : !query ? " layers × heads × queries." : " layers × heads."));
    }
    ui.status.replaceChildren(...parts);
  }

  function drawRecall() {
    const sum = Array.from({ length: LAYERS * HEADS }, () => 0);
    let queries = 0, least = 0;
    data.queries.forEach((query, qi) => {
      if (shown.query >= 0 && shown.query !== qi) return;
      queries++;
      query.layers.forEach((layer, l) => layer[3].forEach((r, h) => sum[h * LAYERS + l] += r * RECALL));
    });
    [...ui.recall.children].forEach((cell, i) => {
      const value = sum[i] / queries;
      if (value < sum[least] / queries) least = i;
      cell.style.setProperty("--v", Math.max(0, value).toFixed(3));
      cell.dataset.v = value.toFixed(3);
      const head = Math.floor(cell.dataset.h * choosers / HEADS);
      cell.classList.toggle("on", (shown.layer >= 0 || shown.head >= 0) &&
        (shown.layer < 0 || shown.layer === Number(cell.dataset.l)) && (shown.head < 0 || shown.head === head));
    });
    ui.recallNote.replaceChildren("0", make("span", "ramp"), "1 · least " + (sum[least] / queries).toFixed(3) +
      " in layer " + least % LAYERS + ", query head " + Math.floor(least / LAYERS));
  }

  function drawTop() {
    const order = [...now.value.keys()].filter(b => now.count[b] > 0)
      .sort((a, b) => now.value[b] - now.value[a] || a - b);
    now.best = order[0] ?? 0;
    ui.top.replaceChildren(...order.slice(0, 8).map(b => {
      const button = makeButton("", undefined, () => pin(b, true)), item = make("li");
      button.append(make("b", "", b), make("span", "", snippet(b)),
        make("em", "", shown.by === "count" ? now.count[b] : now.score[b].toFixed(2)));
      item.append(button);
      return item;
    }));
    rove(ui.top, "button", "Top blocks");
    ui.topNote.textContent = order.length === 0 ? "none"
      : shown.by === "count" ? "block, text, times" : "block, text, score";
    ui.scaleNote.textContent = "chosen, " + (shown.by === "count" ? "1 to " + number(now.most) + " times"
      : "score to " + now.most.toFixed(2));
  }

  function kindOf(b) {
    if (now.count[b] > 0 || now.init[b] || now.local[b]) return "";
    return now.read[b] ? "Read, as everything is." : b * UNIT > now.last ? "After the query." : "Not read.";
  }

  let detailed = -1;  // the block that the details are of
  function drawDetail(b) {
    detailed = b;
    const head = make("div", "head");
    root.classList.toggle("pinned", shown.pin >= 0);
    ui.detail.replaceChildren(head);
    if (b < 0) {
      head.append(make("h3", "", "Point at a block"));
      ui.detail.append(
        make("p", "", "of the text or of the map to see who chose it; click to keep it, arrow keys to move on."));
      return;
    }
    const end = Math.min(LENGTH, (b + 1) * UNIT), close = makeButton("close", "×", () => pin(-1));
    close.setAttribute("aria-label", "close");
    head.append(make("h3", "", "Block " + b), close);
    const about = make("p"), line = make("div", "tokens");
    let flags = 0;
    for (let t = b * UNIT; t < end; t++) {
      flags += punctuation.has(t);
      line.append(make("i", punctuation.has(t) ? "p" : "", visible(data.text[t])));
    }
    about.append("tokens " + number(b * UNIT) + " to " + number(end - 1) + ", " + flags + " punctuation. ");
    if (now.init[b]) about.append(make("b", "", "Init: always read. "));
    if (now.local[b]) about.append(make("b", "", "Local: always read. "));
    if (now.count[b] > 0) {
      about.append("Chosen by ", make("b", "", number(now.count[b]) + " of " + number(now.heads)), ", summed score ",
        make("b", "", now.score[b].toFixed(3)), ".");
    }
    about.append(kindOf(b));
    ui.detail.append(about, line);
    if (now.count[b] > 0) drawChoosers(b);
  }

  function drawChoosers(b) {
    const sum = new Float64Array(LAYERS * choosers), rows = [];
    eachHead((query, layer, l, h, blocks, scores, heads) => {
      const at = blocks.indexOf(Math.floor(b * UNIT / data.layers[l].block));
      if (at < 0) return;
      const wide = choosers / heads;
      for (let c = h * wide; c < (h + 1) * wide; c++) sum[c * LAYERS + l] += scores[at] * SCORE;
      rows.push([l, h, scores[at] * SCORE, query.at]);
    });
    const most = Math.max(...sum), grid = make("div", "grid scores");
    grid.style.gridTemplateColumns = "repeat(" + LAYERS + ", minmax(0, 1fr))";
    sum.forEach((value, i) => {
      const cell = make("i", value > 0 ? "hot" : "");
      cell.style.setProperty("--v", (most > 0 ? value / most : 0).toFixed(3));
      cell.title = "layer " + i % LAYERS + ", head " + Math.floor(i / LAYERS) + ": " +
        (value > 0 ? value.toFixed(4) : "not chosen");
      grid.append(cell);
    });
    const table = make("table"), body = make("tbody"), title = make("tr"), many = shown.query < 0;
    for (const name of ["layer", "head", ...(many ? ["query"] : []), "score"]) title.append(make("th", "", name));
    body.append(title);
    rows.sort((a, c) => c[2] - a[2]);
    for (const [l, h, score, at] of rows.slice(0, 8)) {
      const row = make("tr"), last = make("td"), bar = make("i");
      bar.style.width = 70 * score / rows[0][2] + "px";
      last.append(bar, score.toFixed(4));
      row.append(make("td", "", l), make("td", "", h), ...(many ? [make("td", "", at)] : []), last);
      body.append(row);
    }
    table.append(body);
    ui.detail.append(grid, axis((byQueryHead ? "query" : "KV") + " heads down"), table);
    if (rows.length > 8) ui.detail.append(make("p", "note", "and " + number(rows.length - 8) + " more"));
  }

  // What a screen reader says of the block that the arrow keys are at.
  function describe() {
    const b = shown.pin;
    if (b < 0) return ui.map.removeAttribute("aria-activedescendant");
    const words = ["Block " + b];
    if (now.init[b]) words.push("init");
    if (now.local[b]) words.push("local");
    if (now.count[b] > 0) {
      words.push("chosen by " + now.count[b] + " of " + now.heads, "score " + now.score[b].toFixed(3));
    }
    if (kindOf(b)) words.push(kindOf(b));
    cells[b].setAttribute("aria-label", words.join(", ") + ": " + snippet(b));
    cells[b].setAttribute("aria-selected", "true");
    ui.map.setAttribute("aria-activedescendant", cells[b].id);
  }

  function pin(b, scroll) {
    if (shown.pin >= 0) {
      spans[shown.pin].classList.remove("pin");
      cells[shown.pin].classList.remove("pin");
      cells[shown.pin].removeAttribute("aria-selected");
    }
    shown.pin = b;
    if (b >= 0) {
      spans[b].classList.add("pin");
      cells[b].classList.add("pin");
      if (scroll) spans[b].scrollIntoView({ block: "center" });
      // In the map without moving the page.
      const { map } = ui, top = cells[b].offsetTop - map.offsetTop;
      if (top < map.scrollTop || top + cells[b].offsetHeight > map.scrollTop + map.clientHeight) {
        map.scrollTop = top - map.clientHeight / 2;
      }
    }
    drawDetail(b);
    describe();
    tell();
  }

  // --- events: a handful for the whole, however long the text ---
  let over = -1, clicked = null;  // where the mouse was when a click scrolled: what then is below it was not pointed at
  function hover(b) {
    if (b === over) return;
    if (over >= 0) { spans[over].classList.remove("on"); cells[over].classList.remove("on"); }
    over = b;
    if (b >= 0) { spans[b].classList.add("on"); cells[b].classList.add("on"); }
    const block = b >= 0 ? b : shown.pin;
    if (block !== detailed) drawDetail(block);
  }
  const blockOf = event => {
    const e = event.target.closest("[data-b]");
    return e ? Number(e.dataset.b) : -1;
  };
  function listen() {
    for (const area of [ui.map, ui.text]) {
      area.addEventListener("pointerover", event => {
        if (event.pointerType !== "mouse") return;
        if (clicked && clicked[0] === event.clientX && clicked[1] === event.clientY) return;
        clicked = null;
        hover(blockOf(event));
      });
      area.addEventListener("pointerleave", () => hover(-1));
      area.addEventListener("click", event => {
        const b = blockOf(event), query = area === ui.text ? tokens.indexOf(event.target) : -1;
        if (query >= 0) { shown.query = query; return draw(); }
        clicked = [event.clientX, event.clientY];
        if (b >= 0) pin(b === shown.pin ? -1 : b, area === ui.map);
      });
    }
    ui.map.addEventListener("focus", () => { if (shown.pin < 0 && ui.map.matches(":focus-visible")) pin(now.best); });
    ui.recall.addEventListener("pointerover", ({ target: cell }) => {
      if (!cell.dataset.v) return;
      ui.recallNote.textContent = "layer " + cell.dataset.l + ", query head " + cell.dataset.h + ": " + cell.dataset.v;
    });
    ui.recall.addEventListener("pointerleave", drawRecall);
    ui.recall.addEventListener("click", ({ target: cell }) => {
      if (!cell.dataset.v) return;
      const layer = Number(cell.dataset.l), head = Math.floor(cell.dataset.h * choosers / HEADS);
      const same = shown.layer === layer && shown.head === head;
      shown.layer = same ? -1 : layer;
      shown.head = same ? -1 : head;
      draw();
    });
  }
  // For whoever places the explorer: true where the key was one of its own.
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    if (/^(SELECT|BUTTON|INPUT|TEXTAREA)$/.test(event.target.tagName)) return false;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -BLOCKS, End: BLOCKS };
    // Up, down, Home and End move among the blocks only where the map has the focus; elsewhere they scroll.
    const own = event.target === ui.map || event.key === "ArrowLeft" || event.key === "ArrowRight";
    const step = own ? steps[event.key] : undefined;
    if (event.key === "Escape" && shown.pin >= 0) {
      pin(-1);
      return true;
    }
    if (step === undefined || shown.pin < 0) return false;
    event.preventDefault();
    pin(Math.max(0, Math.min(BLOCKS - 1, shown.pin + step)), true);
    return true;
  }

  build();
  listen();
  if (options.view) setView(options.view);
  draw();
  if (shown.pin >= 0) spans[shown.pin].scrollIntoView({ block: "center" });
  return { onKey };
}
