// Talks to the server that served this page: JSON, text and streams of server-sent events.

export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    const body = await response.json();
    message = body.error?.message ?? body.message ?? message;
  } catch {
    // Not JSON: the status line has to do.
  }
  return new ApiError(message, response.status, Number(response.headers.get('retry-after')) || 0);
}

// Splits bytes as they come into the data of events; events and lines may be cut anywhere.
export class EventParser {
  #decoder = new TextDecoder();
  #rest = '';

  push(bytes) {
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split('\n');
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line.startsWith('data:')) events.push(line.slice(5).trim());
    }
    return events;
  }
}

export class Api {
  key = '';

  #headers(extra = {}) {
    return this.key ? { ...extra, Authorization: `Bearer ${this.key}` } : extra;
  }

  async #get(path, signal) {
    const response = await fetch(path, { headers: this.#headers(), cache: 'no-store', signal });
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  async json(path) {
    return (await this.#get(path)).json();
  }

  async text(path, signal) {
    return (await this.#get(path, signal)).text();
  }

  // Yields each event's JSON until [DONE] or the end. Leaving the loop closes the connection.
  async *stream(path, body, signal) {
    const response = await fetch(path, {
      method: 'POST',
      headers: this.#headers({ 'Content-Type': 'application/json' }),
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await errorOf(response);
    const reader = response.body.getReader();
    const parser = new EventParser();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        for (const data of parser.push(value)) {
          if (data === '[DONE]') return;
          const event = JSON.parse(data);
          if (event.error) throw new ApiError(event.error.message ?? 'the server gave up', event.error.code ?? 500, 0);
          yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}
