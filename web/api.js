// The server's API, as far as the page uses it.

let key = "", model;
export const setKey = value => { key = value; };
export const hasKey = () => key !== "";
export const setModel = id => { model = id; };  // that requests are for, unless they say

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, body, signal) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    const bytes = body instanceof ArrayBuffer;
    Object.assign(options, { method: "POST", body: bytes ? body : JSON.stringify({ model, ...body }) });
    headers["Content-Type"] = bytes ? "application/octet-stream" : "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached; is it still running?", 0);
  }
  if (response.ok) return response;
  const message = await response.json()
    .then(found => found.error.message, () => "The server answered " + response.status + ".");
  throw new ApiError(message, response.status);
}

export const getModels = async () => (await (await request("v1/models")).json()).data;
export const tokenize = async (body, signal) => (await request("tokenize", body, signal)).json();
// A file of any kind that the server reads, as text with its places.
export const readDocument = async (name, bytes, signal) =>
  (await request("documents?name=" + encodeURIComponent(name), bytes, signal)).json();

// The events of a streamed answer, as they come.
async function* events(path, body, signal) {
  const response = await request(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [], tail = "";  // of the event that has not ended: an inspection comes in hundreds
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      const ends = (tail + value).includes("\n\n");
      tail = value.slice(-1);
      if (!ends) continue;
      const found = pieces.join("").split("\n\n");
      pieces = [found.pop()];
      for (const event of found) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(parsed.error.message, 0);
        yield parsed;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError("The connection to the server broke off.", 0);
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("The server ended the answer before it was complete.", 0);
}

export const stream = (path, body, signal) =>
  events(path, { ...body, stream_options: { include_usage: true } }, signal);

// prefill({done, total}): how much of the prompt there is.
export async function inspect(body, prefill, signal) {
  let inspection = null;
  for await (const event of events("inspect", body, signal)) {
    if (event.phsa?.prefill) prefill(event.phsa.prefill); else inspection = event;
  }
  return inspection;
}
