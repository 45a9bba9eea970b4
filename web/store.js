// Conversations, kept in this browser: one store has them, the other their titles.
const TITLES = "titles", WHOLE = "conversations";
let opened = null;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("phsa", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(TITLES, { keyPath: "id" });
      request.result.createObjectStore(WHOLE, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function change(act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([TITLES, WHOLE], "readwrite");
    act(transaction.objectStore(TITLES), transaction.objectStore(WHOLE));
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
// conversation: {id, title, turns}
export const save = conversation => change((titles, whole) => {
  titles.put({ id: conversation.id, title: conversation.title, changed: Date.now() });
  whole.put(conversation);
});
export const remove = id => change((titles, whole) => { titles.delete(id); whole.delete(id); });
export const load = async id => done((await open()).transaction(WHOLE).objectStore(WHOLE).get(id));
// {id, title, changed} of each, the latest first.
export const list = async () => (await done((await open()).transaction(TITLES).objectStore(TITLES).getAll()))
  .sort((a, b) => b.changed - a.changed);
