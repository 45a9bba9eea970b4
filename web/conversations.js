// The list of conversations that this browser keeps.
import { make, makeButton } from "./explorer.js";
import { list, remove } from "./store.js";

const $ = id => document.getElementById(id);

export function installConversations(chat) {
  async function show() {
    let kept = [];
    try {
      kept = await list();
      $("kept-note").textContent = kept.length > 0 ? "Kept in this browser, with their documents, and nowhere else."
        : "None yet. Those to come are kept in this browser, with their documents, and nowhere else.";
    } catch {
      $("kept-note").textContent = "This browser keeps nothing for this page: a conversation ends with it.";
    }
    $("kept").replaceChildren(...kept.map(({ id, title, changed }) => {
      const item = make("li"), open = makeButton("open", undefined, async () => {
        if (await chat.open(id)) $("conversations").close();
      });
      open.append(make("span", "", title), make("small", "soft", new Date(changed).toLocaleString()));
      const away = makeButton("remove", "×", async () => {
        await remove(id);
        if (chat.isOpen(id)) chat.clear();
        await show();
        ($("kept").querySelector("button") ?? $("conversations-close")).focus();
      });
      away.setAttribute("aria-label", "Delete " + title);
      open.disabled = away.disabled = chat.isRunning();
      if (chat.isOpen(id)) open.setAttribute("aria-current", "true");
      item.append(open, away);
      return item;
    }));
  }
  $("conversations-open").addEventListener("click", async () => {
    await show();
    $("conversations").showModal();
  });
  $("conversations-close").addEventListener("click", () => $("conversations").close());
  // A click beside it.
  $("conversations").addEventListener("click", event => {
    if (event.target === $("conversations")) $("conversations").close();
  });
}
