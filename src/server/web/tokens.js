// Tokens with their probabilities: where each lies in the text, and the card that shows them.

const visible = (text) =>
  text === '' ? '∅' : text.replace(/ /g, '␣').replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/\r/g, '␍');

export const percent = (logprob) => {
  const p = Math.exp(logprob) * 100;
  return p >= 99.95 ? '100%' : p >= 10 ? `${p.toFixed(1)}%` : p >= 0.01 ? `${p.toPrecision(2)}%` : '<0.01%';
};

const RESYNC = 8; // characters that may lie between two tokens that are found

// Lays tokens over the text that they make. The two need not agree: tokens may hold half a character,
// the server leaves out special tokens and leading spaces and holds text back. A token that is not
// found in its place gets no text, and those after it are looked for a little further on.
export class TokenTrack {
  tokens = []; // {text, logprob, top: [{text, logprob}]} and, once placed, start and end
  placed = 0; // so many of them have their place
  #pieces = []; // what each adds to the text
  #decoder = new TextDecoder();
  #begin; // where the first token begins: an answer that is continued has text before it
  #at; // where the next token begins

  constructor(begin = 0) {
    this.#begin = begin;
    this.#at = begin;
  }

  // The tokens so far lie before this place.
  get end() {
    return this.#at;
  }

  // Entries as /v1/chat/completions gives them in logprobs.content.
  addChat(entries) {
    for (const e of entries) {
      this.#add(e.token, e.logprob, e.bytes, e.top_logprobs.map((t) => ({ text: t.token, logprob: t.logprob })));
    }
  }

  // The logprobs object of /v1/completions.
  addCompletion(logprobs) {
    logprobs.tokens.forEach((token, i) => {
      const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([text, logprob]) => ({ text, logprob }));
      this.#add(token, logprobs.token_logprobs[i], null, top);
    });
  }

  #add(text, logprob, bytes, top) {
    top.sort((a, b) => b.logprob - a.logprob);
    this.tokens.push({ text, logprob, top });
    this.#pieces.push(bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : text);
  }

  // Places as many tokens as `content` has text for; all of them when it is complete.
  place(content, complete) {
    for (; this.placed < this.tokens.length; this.placed++) {
      const token = this.tokens[this.placed];
      let piece = this.#pieces[this.placed];
      const rest = content.slice(this.#at, this.#at + piece.length);
      if (rest !== piece && piece.startsWith(rest) && !complete) return;
      if (rest !== piece && this.#at === this.#begin) piece = piece.trimStart();
      const near = content.slice(this.#at, this.#at + piece.length + RESYNC);
      const found = piece === '' ? -1 : near.indexOf(piece);
      token.start = this.#at + Math.max(0, found);
      token.end = found < 0 ? this.#at : token.start + piece.length;
      this.#at = token.end;
    }
  }
}

function spanOf(token, index, text) {
  const span = document.createElement('span');
  span.className = token.logprob < Math.log(0.05) ? 'tok verylow' : token.logprob < Math.log(0.3) ? 'tok low' : 'tok';
  span.dataset.i = String(index);
  span.textContent = text;
  return span;
}

// The pieces of content[start, end), one span per token where there are tokens.
function pieces(content, track, start, end) {
  const out = [];
  let low = 0;
  let high = track.placed;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (track.tokens[mid].end <= start) low = mid + 1;
    else high = mid;
  }
  let at = start;
  for (let i = low; i < track.placed && at < end; i++) {
    const token = track.tokens[i];
    const from = Math.max(at, token.start);
    const to = Math.min(end, token.end);
    if (to <= from) continue;
    if (from > at) out.push(content.slice(at, from));
    out.push(spanOf(token, i, content.slice(from, to)));
    at = to;
  }
  if (at < end) out.push(content.slice(at, end));
  return out;
}

const NEAR = 300; // markup that may lie between two pieces of shown text

// Marks the tokens in `root`, which shows the Markdown content[start, end). What is shown comes in the order of
// its source; a line that is not found there (an entity, maths) stays without tokens.
export function markTokens(root, content, track, start, end) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, (n) =>
    n.parentElement?.closest('.codehead, .math') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  let at = start;
  for (const text of texts) {
    const out = [];
    for (const line of text.data.split(/(?<=\n)/)) {
      const found = content.slice(at, Math.min(end, at + NEAR + line.length)).indexOf(line);
      if (found < 0) {
        out.push(line);
        continue;
      }
      at += found;
      out.push(...pieces(content, track, at, at + line.length));
      at += line.length;
    }
    text.replaceWith(...out);
  }
}

export class TokenCard {
  constructor(root) {
    this.root = root;
    addEventListener('scroll', () => this.hide(), true);
  }

  #row(text, logprob, chosen) {
    const row = document.createElement('div');
    row.className = chosen ? 'choice chosen' : 'choice';
    const level = document.createElement('span');
    level.className = 'level';
    level.style.width = `${Math.exp(logprob) * 100}%`;
    const piece = document.createElement('span');
    piece.className = 'piece';
    piece.textContent = visible(text);
    const value = document.createElement('span');
    value.textContent = percent(logprob);
    row.append(level, piece, value);
    return row;
  }

  show(token, anchor) {
    const head = document.createElement('h3');
    const piece = document.createElement('span');
    piece.className = 'piece';
    piece.textContent = visible(token.text);
    const value = document.createElement('span');
    value.textContent = percent(token.logprob);
    head.append(piece, value);
    const rows = token.top.map((t) => this.#row(t.text, t.logprob, t.text === token.text));
    if (!token.top.some((t) => t.text === token.text)) rows.push(this.#row(token.text, token.logprob, true));
    this.root.replaceChildren(head, ...rows);
    this.root.hidden = false;
    const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const card = this.root.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - card.width - 8));
    const above = box.top - card.height - 8;
    this.root.style.left = `${left}px`;
    this.root.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  }

  hide() {
    this.root.hidden = true;
  }
}
