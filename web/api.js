// The server's API, as far as the page uses it.

let key = "";
export const setKey = value => { key = value; };

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
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
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

export const getModel = async () => (await (await request("v1/models")).json()).data[0];
export const inspect = async (body, signal) => (await request("inspect", body, signal)).json();
export const tokenize = async (body, signal) => (await request("tokenize", body, signal)).json();

// The events of a streamed answer, as they come.
export async function* stream(path, body, signal) {
  const response = await request(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new ApiError(found.error.message, 0);
        yield found;
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
