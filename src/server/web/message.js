// One message on the page: its text in blocks, its tokens, its buttons.

import { parseBlocks } from './markdown.js';

function element(tag, className, text) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined) e.textContent = text;
  return e;
}

export function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  return svg;
}

export class MessageView {
  #blocks = []; // {source, start, tokens, node}: what is on the page now
  #at = -1; // the token that the arrow keys chose

  // `actions`: {edit, retry, copy} functions; `card`: the page's TokenCard.
  constructor(message, actions, card) {
    this.message = message;
    this.actions = actions;
    this.card = card;
    const assistant = message.role === 'assistant';
    this.root = element('li', `message ${message.role}`);
    this.root.append(element('div', assistant ? 'who' : 'hidden', assistant ? 'Freshet' : 'You'));
    this.thought = element('details', 'thought');
    this.thought.open = true;
    this.thought.append(element('summary', '', 'Thought'), element('p'));
    this.body = element('div', 'body');
    this.problem = element('p', 'error');
    this.problem.setAttribute('role', 'alert');
    this.problem.hidden = true;
    this.meta = element('div', 'meta');
    this.numbers = element('p', 'numbers');
    this.#buttons(assistant);
    this.root.append(this.thought, this.body, this.problem, this.meta);
    if (assistant) this.#watchTokens();
    this.update();
  }

  #buttons(assistant) {
    const add = (name, label, run) => {
      const button = element('button', 'act');
      button.type = 'button';
      button.title = label;
      button.setAttribute('aria-label', label);
      button.append(icon(name));
      button.addEventListener('click', run);
      this.meta.append(button);
    };
    add('copy', 'Copy', () => this.actions.copy(this.message));
    add('edit', 'Edit', () => this.edit());
    if (assistant) add('retry', 'Retry', () => this.actions.retry(this.message));
    if (assistant) this.meta.append(this.numbers);
  }

  #tokenOf(target) {
    const span = target.closest?.('.tok');
    return span && this.body.contains(span) ? [span, this.message.track.tokens[Number(span.dataset.i)]] : null;
  }

  #watchTokens() {
    const show = (e) => {
      const found = this.#tokenOf(e.target);
      if (found) this.card.show(found[1], found[0]);
      else this.card.hide();
    };
    this.body.addEventListener('pointerover', show);
    this.body.addEventListener('pointerleave', () => this.card.hide());
    this.body.addEventListener('keydown', (e) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!step || e.ctrlKey || e.metaKey || e.altKey) return;
      const spans = [...this.body.querySelectorAll('.tok')];
      if (spans.length === 0) return;
      e.preventDefault();
      spans[this.#at]?.classList.remove('at');
      this.#at = Math.min(spans.length - 1, Math.max(0, this.#at + step));
      const span = spans[this.#at];
      span.classList.add('at');
      span.scrollIntoView({ block: 'nearest' });
      this.card.show(this.message.track.tokens[Number(span.dataset.i)], span);
    });
    this.body.addEventListener('blur', () => {
      this.body.querySelector('.at')?.classList.remove('at');
      this.#at = -1;
      this.card.hide();
    });
  }

  // Puts source[start, end) under `parent`, a span a token where there are tokens.
  #fill(parent, start, end) {
    const { content, track } = this.message;
    const count = track?.placed ?? 0;
    let low = 0;
    let high = count;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (track.tokens[mid].end <= start) low = mid + 1;
      else high = mid;
    }
    let at = start;
    for (let i = low; i < count && at < end; i++) {
      const token = track.tokens[i];
      const from = Math.max(at, token.start);
      const to = Math.min(end, token.end);
      if (to <= from) continue;
      if (from > at) parent.append(content.slice(at, from));
      const span = element('span', 'tok', content.slice(from, to));
      if (token.logprob < Math.log(0.05)) span.classList.add('verylow');
      else if (token.logprob < Math.log(0.3)) span.classList.add('low');
      span.dataset.i = String(i);
      parent.append(span);
      at = to;
    }
    if (at < end) parent.append(content.slice(at, end));
  }

  #blockNode(block) {
    if (block.kind === 'code') {
      const box = element('div', 'codeblock');
      if (block.language) box.append(element('header', '', block.language));
      const pre = element('pre');
      pre.tabIndex = 0;
      const code = element('code');
      for (const span of block.spans) this.#fill(code, span.start, span.end);
      pre.append(code);
      box.append(pre);
      return box;
    }
    const p = element('p');
    for (const span of block.spans) {
      const target = span.code ? element('code') : p;
      this.#fill(target, span.start, span.end);
      if (span.code) p.append(target);
    }
    return p;
  }

  // Brings the page in line with the message. Blocks before the last are done and left alone.
  update() {
    const { content, thought, track, role, streaming, error, stats } = this.message;
    this.thought.hidden = thought === '';
    this.thought.lastChild.textContent = thought;
    track?.place(content, !streaming);
    const tokens = track !== null && track.placed > 0;
    const plain = [{ kind: 'text', start: 0, end: content.length, spans: [{ start: 0, end: content.length, code: false }] }];
    const blocks = role === 'assistant' ? parseBlocks(content) : plain;
    let keep = 0;
    while (keep < this.#blocks.length - 1 && keep < blocks.length - 1) {
      const old = this.#blocks[keep];
      const { start, end } = blocks[keep];
      if (old.start !== start || old.tokens !== tokens || old.source !== content.slice(start, end)) break;
      keep++;
    }
    for (const old of this.#blocks.splice(keep)) old.node.remove();
    for (const block of blocks.slice(keep)) {
      const node = this.#blockNode(block);
      this.#blocks.push({ node, tokens, start: block.start, source: content.slice(block.start, block.end) });
    }
    if (blocks.length === 0) this.#blocks.push({ node: element('p'), start: -1, source: '', tokens });
    this.body.append(...this.#blocks.slice(keep).map((b) => b.node));
    this.root.classList.toggle('streaming', Boolean(streaming));
    this.root.setAttribute('aria-busy', String(Boolean(streaming)));
    this.meta.hidden = Boolean(streaming);
    if (tokens) {
      this.body.tabIndex = 0;
      this.body.setAttribute('role', 'group');
      this.body.setAttribute('aria-label', 'Answer; the arrow keys walk through its tokens');
    }
    this.problem.hidden = !error;
    this.problem.textContent = error ?? '';
    this.numbers.textContent = stats ?? '';
  }

  edit() {
    const form = element('form', 'editor');
    const field = element('textarea');
    field.value = this.message.content;
    field.rows = Math.min(14, Math.max(2, field.value.split('\n').length));
    field.setAttribute('aria-label', 'Edit message');
    const cancel = element('button', 'plain', 'Cancel');
    cancel.type = 'button';
    const save = element('button', 'plain primary', this.message.role === 'user' ? 'Send' : 'Save');
    const row = element('div', 'row');
    row.append(cancel, save);
    form.append(field, row);
    const close = () => {
      form.replaceWith(this.body);
      this.meta.hidden = false;
    };
    const done = () => {
      const text = field.value;
      close();
      if (text.trim() !== '') this.actions.edit(this.message, text);
    };
    cancel.addEventListener('click', close);
    form.addEventListener('submit', (e) => {
      e.preventDefault();
      done();
    });
    field.addEventListener('keydown', (e) => {
      if (e.key === 'Escape') {
        e.stopPropagation();
        close();
      } else if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) {
        e.preventDefault();
        done();
      }
    });
    this.body.replaceWith(form);
    this.meta.hidden = true;
    field.focus();
  }
}
