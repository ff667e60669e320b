// One message on the page: its thoughts, its text in blocks, its tokens, its buttons.

import { spokenText, splitThought } from './conversation.js';
import { copyText, element, icon, iconButton } from './dom.js';
import { fileChip } from './files.js';
import { blocksOf } from './markdown.js';
import { markTokens } from './tokens.js';

export class MessageView {
  #blocks = []; // {key, waits, node}: what is on the page now
  #at = -1; // the token that the arrow keys chose
  #touched = false; // the reader has opened or closed the thoughts

  // `actions`: {edit, retry, goOn, choose, branch, last} of the chat; `card`: the page's TokenCard.
  constructor(message, actions, card) {
    this.message = message;
    this.actions = actions;
    this.card = card;
    const assistant = message.role === 'assistant';
    this.root = element('li', `message ${message.role}`);
    this.who = element('div', assistant ? 'who' : 'hidden', assistant ? message.model || 'Answer' : 'You');
    this.files = element('div', 'chips');
    this.files.append(...message.files.map(fileChip));
    this.files.hidden = message.files.length === 0;
    this.thought = element('details', 'thought');
    this.thoughtTitle = element('summary');
    this.thoughtText = element('p');
    this.thoughtTitle.addEventListener('click', () => (this.#touched = true));
    this.thought.append(this.thoughtTitle, this.thoughtText);
    this.body = element('div', 'body');
    this.problem = element('p', 'error');
    this.problem.setAttribute('role', 'alert');
    this.problem.hidden = true;
    this.meta = element('div', 'meta');
    this.numbers = element('p', 'numbers');
    this.#buttons(assistant);
    this.root.append(this.who, this.files, this.thought, this.body, this.problem, this.meta);
    if (assistant) this.#watchTokens();
    this.update();
  }

  #buttons(assistant) {
    const add = (name, label, run, className = 'act idle') => {
      const button = iconButton(className, name, label, run);
      this.meta.append(button);
      return button;
    };
    this.branches = element('div', 'branches');
    this.branches.setAttribute('role', 'group');
    this.branches.setAttribute('aria-label', 'Versions');
    this.earlier = iconButton('act idle', 'left', 'Earlier version', () => this.actions.choose(this.message, -1));
    this.later = iconButton('act idle', 'right', 'Later version', () => this.actions.choose(this.message, 1));
    this.which = element('span');
    this.branches.append(this.earlier, this.which, this.later);
    this.meta.append(this.branches);
    const copy = add('copy', 'Copy', () => {
      const text = assistant ? splitThought(this.message).answer || this.message.content : spokenText(this.message);
      copyText(text, copy);
    }, 'act');
    add('edit', 'Edit', () => this.edit());
    if (!assistant) return;
    add('retry', 'Retry', () => this.actions.retry(this.message));
    this.more = element('button', 'plain idle', 'Continue');
    this.more.type = 'button';
    this.more.prepend(icon('continue'));
    this.more.addEventListener('click', () => this.actions.goOn(this.message));
    this.meta.append(this.more, this.numbers);
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
      if (!step || e.ctrlKey || e.metaKey || e.altKey || e.target !== this.body) return;
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

  #showThought(thought, answer) {
    const { streaming } = this.message;
    this.thought.hidden = thought === '';
    if (thought === '') return;
    const thinking = streaming && answer.trim() === '';
    this.thoughtTitle.textContent = thinking ? 'Thinking…' : 'Thoughts';
    if (this.thoughtText.textContent !== thought) this.thoughtText.textContent = thought;
    if (!this.#touched) this.thought.open = thinking;
  }

  #plainBlocks(text) {
    return text === '' ? [] : [{ start: 0, end: text.length, context: '', draw: () => ({ node: element('p', 'plaintext', text) }) }];
  }

  // Blocks that have not changed since they were drawn are left alone.
  #showBlocks(answer, offset) {
    const { content, track, role, plain } = this.message;
    const blocks = role === 'assistant' && !plain ? blocksOf(answer) : this.#plainBlocks(answer);
    const marked = (block) => Boolean(track && track.placed > 0 && track.end > offset + block.start);
    const keyOf = (block) => {
      const state = !marked(block) ? 'plain' : track.end >= offset + block.end ? 'marked' : `to ${track.end}`;
      return [block.start, state, block.context, answer.slice(block.start, block.end)].join('\0');
    };
    const keys = blocks.map(keyOf);
    let keep = 0;
    while (keep < this.#blocks.length && keep < blocks.length) {
      if (this.#blocks[keep].key !== keys[keep] || this.#blocks[keep].waits) break;
      keep++;
    }
    for (const old of this.#blocks.splice(keep)) old.node.remove();
    for (let i = keep; i < blocks.length; i++) {
      const { node, waits } = blocks[i].draw();
      if (marked(blocks[i])) markTokens(node, content, track, offset + blocks[i].start, offset + blocks[i].end);
      this.#blocks.push({ key: keys[i], waits, node });
      this.body.append(node);
    }
  }

  // Brings the page in line with the message.
  update() {
    const { content, track, streaming, error, stats } = this.message;
    const { thought, answer, offset } = splitThought(this.message);
    track?.place(content, !streaming);
    this.#showThought(thought, answer);
    this.#showBlocks(answer, offset);
    this.root.classList.toggle('streaming', Boolean(streaming));
    this.root.classList.toggle('waiting', Boolean(streaming) && this.#blocks.length === 0);
    this.root.setAttribute('aria-busy', String(Boolean(streaming)));
    if (track && track.placed > 0) {
      this.body.tabIndex = 0;
      this.body.setAttribute('role', 'group');
      this.body.setAttribute('aria-label', 'Answer; the arrow keys walk through its tokens');
    }
    this.problem.hidden = !error;
    this.problem.textContent = error ?? '';
    this.numbers.textContent = stats ?? '';
    this.updateFrame();
  }

  // What depends on the messages around this one.
  updateFrame() {
    const { message, actions } = this;
    const [which, count] = actions.branch(message);
    this.branches.hidden = count < 2;
    this.which.textContent = `${which}/${count}`;
    this.earlier.disabled = which <= 1;
    this.later.disabled = which >= count;
    if (!this.more) return;
    this.who.textContent = message.model || 'Answer';
    const cut = message.error || ['length', 'stopped', 'interrupted', 'abort'].includes(message.finish);
    this.more.hidden = !cut || message.streaming || message.content === '' || !actions.last(message);
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
