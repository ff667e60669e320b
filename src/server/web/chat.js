// The conversation that is shown: asking, answering, branches, and keeping it.

import { requestFor, streamAnswer } from './answer.js';
import { Conversation } from './conversation.js';
import { $, arrange, element, toast } from './dom.js';
import { onLibrary } from './markdown.js';
import { MessageView } from './message.js';

const SAVE_MS = 1000; // while an answer is written

// Reads out whole sentences as they are written; word by word nobody could follow.
class Announcer {
  #said;

  constructor(from) {
    this.#said = from;
  }

  say(content, last) {
    const fresh = content.slice(this.#said);
    const end = last ? fresh.length : fresh.search(/[.!?:]\s[^]*$|\n/) + 1;
    if (end <= 0) return;
    $('announce').textContent = fresh.slice(0, end);
    this.#said += end;
  }
}

export class Chat {
  mode = 'chat'; // or 'plain'
  #conversation = new Conversation();
  #views = new Map(); // node -> MessageView
  #running = null; // {controller, conversation} of the answer being written
  #loading = 0;

  // `page`: {api, store, settings, card, model(), shown(id, title), changed(), busy(on), explain(error)}
  constructor(page) {
    this.page = page;
    this.actions = {
      retry: (node) => this.#retry(node),
      edit: (node, text) => this.#edit(node, text),
      goOn: (node) => this.#goOn(node),
      choose: (node, step) => this.#choose(node, step),
      branch: (node) => this.#conversation.branch(node),
      last: (node) => this.#conversation.path().at(-1) === node,
    };
    onLibrary(() => this.#views.forEach((view) => view.update()));
  }

  get id() {
    return this.#conversation.empty ? '' : this.#conversation.id;
  }

  get running() {
    return this.#running !== null;
  }

  get lastUser() {
    const node = this.#conversation.path().findLast((n) => n.role === 'user');
    return node ? this.#views.get(node) : null;
  }

  get lastAnswer() {
    const node = this.#conversation.path().findLast((n) => n.role === 'assistant');
    return node ?? null;
  }

  // --- what is shown

  async show(id) {
    const turn = ++this.#loading;
    this.stop();
    const record = id ? await this.page.store.get(id) : null;
    if (turn !== this.#loading) return;
    if (id && !record) toast('This conversation is not in this browser');
    this.#conversation = record ? Conversation.from(record) : new Conversation();
    this.#views.clear();
    this.#arrange();
    this.page.shown(this.id, this.#conversation.title);
    this.toEnd();
  }

  renamed(id, title) {
    if (id !== this.#conversation.id) return;
    this.#conversation.title = title;
    this.#conversation.named = true;
    this.page.shown(this.id, title);
  }

  #viewOf(node) {
    if (!this.#views.has(node)) this.#views.set(node, new MessageView(node, this.actions, this.page.card));
    return this.#views.get(node);
  }

  // The list of messages is that of the path.
  #arrange() {
    const wanted = this.#conversation.path().map((node) => this.#viewOf(node));
    arrange($('log'), wanted.map((view) => view.root));
    wanted.forEach((view) => view.updateFrame());
    $('welcome').hidden = wanted.length > 0;
  }

  atEnd = () => $('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight < 60;
  toEnd = () => ($('scroll').scrollTop = $('scroll').scrollHeight);

  // --- what the user does

  send(text, files) {
    if (this.#running) return;
    const parent = this.#conversation.path().at(-1) ?? null;
    this.#conversation.add('user', parent, { content: text, files });
    this.#answer();
  }

  stop() {
    this.#running?.controller.abort();
  }

  retryLast() {
    const node = this.#conversation.path().at(-1);
    if (node?.role === 'assistant') this.#retry(node);
  }

  #retry(node) {
    if (this.#running) return;
    if (node.content === '' && node.thought === '') this.#conversation.remove(node); // nothing to keep
    this.#answer(this.#conversation.parentOf(node));
  }

  #edit(node, text) {
    if (this.#running) return;
    if (node.role === 'user') {
      const parent = this.#conversation.parentOf(node);
      this.#conversation.add('user', parent, { content: text, files: node.files });
      this.#answer();
      return;
    }
    Object.assign(node, { content: text, track: null, stats: 'edited', finish: 'stopped', tokens: 0 });
    this.#viewOf(node).update();
    this.#save();
  }

  #goOn(node) {
    if (!this.#running) this.#answer(this.#conversation.parentOf(node), node);
  }

  #choose(node, step) {
    if (this.#running) return;
    this.#conversation.choose(node, step);
    this.#arrange();
    this.#save();
  }

  // --- answers

  async #answer(parent = this.#conversation.path().at(-1) ?? null, node = null) {
    const { page } = this;
    const conversation = this.#conversation;
    const model = page.model();
    const answer = node ?? conversation.add('assistant', parent, { model, plain: this.mode === 'plain' });
    answer.model ||= model;
    answer.error = null;
    answer.streaming = true;
    const logprobs = page.settings.logprobs.checked;
    const controller = new AbortController();
    this.#running = { controller, conversation };
    page.busy(true);
    this.#arrange();
    this.#save();
    const view = this.#viewOf(answer);
    const paint = this.#painter(view);
    const announcer = new Announcer(answer.content.length);
    let saved = performance.now();
    let noTemplate = false;
    view.update();
    this.toEnd();
    try {
      const request = requestFor(conversation.before(answer), answer, {
        mode: this.mode, model, logprobs, fields: page.settings.sampling(),
        system: page.settings.system.value.trim(),
      });
      await streamAnswer({
        api: page.api, request, node: answer, mode: this.mode, logprobs, signal: controller.signal,
        changed: () => {
          announcer.say(answer.content, false);
          paint.soon();
          if (performance.now() - saved < SAVE_MS) return;
          saved = performance.now();
          this.#save(conversation, true);
        },
      });
    } catch (error) {
      noTemplate = error.status === 400 && this.mode === 'chat' && /no chat template/.test(error.message);
      if (!noTemplate) answer.error = page.explain(error);
    }
    answer.streaming = false;
    paint.cancel();
    this.#running = null;
    page.busy(false);
    if (noTemplate && conversation === this.#conversation) {
      conversation.remove(answer);
      page.noTemplate();
      await this.#answer(parent);
      return;
    }
    announcer.say(answer.content, true);
    const stuck = this.atEnd();
    view.update();
    if (stuck) this.toEnd();
    this.#save(conversation);
  }

  // Draws at most once per frame, and less often where drawing takes long.
  #painter(view) {
    let frame = 0;
    let wait = 0;
    let timer = 0;
    const paint = () => {
      frame = 0;
      const begin = performance.now();
      const stuck = this.atEnd();
      view.update();
      if (stuck) this.toEnd();
      wait = 4 * (performance.now() - begin);
    };
    const next = () => {
      timer = 0;
      frame ||= requestAnimationFrame(paint);
    };
    return {
      soon: () => {
        if (!frame && !timer) timer = setTimeout(next, wait < 40 ? 0 : wait);
      },
      cancel: () => {
        clearTimeout(timer);
        cancelAnimationFrame(frame);
      },
    };
  }

  // `meanwhile`: the answer is still being written, and the list stays as it is.
  async #save(conversation = this.#conversation, meanwhile = false) {
    conversation.updated = Date.now();
    try {
      await this.page.store.put(conversation.record(), meanwhile);
    } catch {
      toast('The browser could not keep this conversation (is its storage full?)');
    }
    if (meanwhile) return;
    if (conversation === this.#conversation) this.page.shown(this.id, conversation.title);
    this.page.changed();
  }

  showIdeas(ideas, take) {
    if ([...$('ideas').children].map((button) => button.textContent).join('\n') === ideas.join('\n')) return;
    $('ideas').replaceChildren(...ideas.map((idea) => {
      const button = element('button', '', idea);
      button.type = 'button';
      button.addEventListener('click', () => take(idea));
      return button;
    }));
  }
}
