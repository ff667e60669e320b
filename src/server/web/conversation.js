// A conversation: a tree of messages. Retrying an answer or editing a question adds a sibling, and nothing
// written is lost. `path()` is the branch that is shown.
//
// node: {id, parent, role, content, thought, plain, model, stats, finish, tokens, files, created}, and while the page
// lasts also track, streaming and error. `parent` is '' for the first messages; `plain`: no Markdown, the
// continuation of a text.

import { newId } from './dom.js';
import { isPicture } from './files.js';

const ID = /^[\w-]{1,64}$/;
const FINISHES = ['stop', 'length', 'stopped', 'interrupted', 'tool_calls', 'abort'];
const MAX_NODES = 20_000;
const text = (value, most) => (typeof value === 'string' ? value.slice(0, most) : '');
const time = (value) => (Number.isFinite(value) ? value : Date.now());

export class Conversation {
  id = newId();
  title = '';
  named = false; // by the user
  created = Date.now();
  updated = Date.now();
  #nodes = new Map();
  #children = new Map(); // parent id -> ids
  #chosen = new Map(); // parent id -> id

  get empty() {
    return this.#nodes.size === 0;
  }

  add(role, parent, fields = {}) {
    const node = {
      id: newId(), parent: parent?.id ?? '', role, content: '', thought: '', plain: false, model: '', stats: '', finish: '',
      tokens: 0, files: [], created: Date.now(), ...fields,
    };
    this.#insert(node);
    this.#chosen.set(node.parent, node.id);
    if (!this.named && role === 'user' && this.title === '') this.title = titleOf(node);
    return node;
  }

  #insert(node) {
    this.#nodes.set(node.id, node);
    if (!this.#children.has(node.parent)) this.#children.set(node.parent, []);
    this.#children.get(node.parent).push(node.id);
  }

  // Takes back a leaf.
  remove(node) {
    this.#nodes.delete(node.id);
    const siblings = this.#children.get(node.parent);
    siblings.splice(siblings.indexOf(node.id), 1);
    if (siblings.length > 0) this.#chosen.set(node.parent, siblings.at(-1));
    else this.#chosen.delete(node.parent);
  }

  path() {
    const nodes = [];
    let at = '';
    for (;;) {
      const children = this.#children.get(at);
      if (!children || children.length === 0) return nodes;
      const chosen = this.#chosen.get(at);
      at = children.includes(chosen) ? chosen : children.at(-1);
      nodes.push(this.#nodes.get(at));
    }
  }

  before(node) {
    const path = this.path();
    return path.slice(0, path.indexOf(node));
  }

  parentOf(node) {
    return this.#nodes.get(node.parent) ?? null;
  }

  // -> [which, of how many], counted from 1
  branch(node) {
    const siblings = this.#children.get(node.parent) ?? [];
    return [siblings.indexOf(node.id) + 1, siblings.length];
  }

  choose(node, step) {
    const siblings = this.#children.get(node.parent);
    const at = siblings.indexOf(node.id) + step;
    if (at >= 0 && at < siblings.length) this.#chosen.set(node.parent, siblings[at]);
  }

  // What is stored and exported; plain data.
  record() {
    const nodes = [...this.#nodes.values()].map(
      ({ id, parent, role, content, thought, plain, model, stats, finish, tokens, files, created }) =>
        ({ id, parent, role, content, thought, plain, model, stats, finish, tokens, files, created }));
    return {
      id: this.id, title: this.title, named: this.named, created: this.created, updated: this.updated,
      nodes, chosen: [...this.#chosen],
    };
  }

  // Only well-formed parts of `record` are used; it may come from a file. Throws an Error that says why.
  static from(record) {
    if (typeof record !== 'object' || record === null || !Array.isArray(record.nodes)) {
      throw new Error('a conversation has no list "nodes"');
    }
    if (record.nodes.length > MAX_NODES) throw new Error(`a conversation has more than ${MAX_NODES} messages`);
    const c = new Conversation();
    if (ID.test(record.id)) c.id = record.id;
    c.title = text(record.title, 200);
    c.named = record.named === true;
    c.created = time(record.created);
    c.updated = time(record.updated);
    for (const n of record.nodes) {
      const known = ID.test(n?.id) && !c.#nodes.has(n.id) && (n.parent === '' || c.#nodes.has(n.parent));
      if (!known || !['user', 'assistant'].includes(n.role) || typeof n.content !== 'string') {
        throw new Error('a message lacks a role, a text, or the message before it');
      }
      c.#insert({
        id: n.id, parent: n.parent, role: n.role, content: n.content, thought: text(n.thought, Infinity),
        plain: n.plain === true, model: text(n.model, 200), stats: text(n.stats, 300), created: time(n.created),
        finish: FINISHES.includes(n.finish) ? n.finish : '', tokens: Number.isFinite(n.tokens) ? n.tokens : 0,
        files: (Array.isArray(n.files) ? n.files : []).filter((f) => typeof f?.text === 'string' || isPicture(f?.picture))
          .map((f) => ({ name: text(f.name, 200), ...(isPicture(f.picture) ? { picture: f.picture } : { text: f.text }) })),
      });
    }
    for (const pair of Array.isArray(record.chosen) ? record.chosen : []) {
      if (Array.isArray(pair) && c.#nodes.has(pair[1])) c.#chosen.set(pair[0], pair[1]);
    }
    if (c.title === '') c.title = titleOf(c.path()[0]);
    return c;
  }
}

export function titleOf(node) {
  const line = (node?.content ?? '').trim().split('\n')[0].replace(/\s+/g, ' ') || node?.files?.[0]?.name || 'Conversation';
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

// Two states of a conversation, as two tabs may have them: all messages of both, the name that the user gave,
// and the rest of `newer`.
export function merged(older, newer) {
  const known = new Set(newer.nodes.map((n) => n.id));
  const extra = (older?.nodes ?? []).filter((n) => !known.has(n.id));
  const name = older?.named && !newer.named ? { title: older.title, named: true } : {};
  const nodes = [...newer.nodes];
  const ids = new Set(known);
  for (const n of extra) {
    // An answer that was taken back leaves nothing behind; others keep their place in the tree.
    if (n.content === '' || (n.parent !== '' && !ids.has(n.parent))) continue;
    ids.add(n.id);
    nodes.push(n);
  }
  return { ...newer, nodes, ...name };
}

// The text of a question with its text files, as the model gets it.
export function spokenText(node) {
  const parts = node.files.filter((file) => !file.picture).map(({ name, text: content }) => {
    const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length));
    const fence = '`'.repeat(longest + 1);
    return `File ${name}:\n${fence}\n${content}${content.endsWith('\n') ? '' : '\n'}${fence}`;
  });
  if (node.content !== '') parts.push(node.content);
  return parts.join('\n\n');
}

// An answer may hold its thoughts as <think>...</think>; some templates write the opening tag themselves.
// -> {thought, answer, offset}: `answer` is node.content from `offset` on
export function splitThought(node) {
  const { content } = node;
  if (node.role !== 'assistant') return { thought: '', answer: content, offset: 0 };
  const begin = /^\s*<think>/.exec(content);
  const close = content.indexOf('</think>');
  if (!begin && close < 0) return { thought: node.thought, answer: content, offset: 0 };
  const from = begin ? begin[0].length : 0;
  const inner = content.slice(from, close < 0 ? undefined : close).trim();
  const thought = [node.thought, inner].filter((t) => t !== '').join('\n\n');
  if (close < 0) return { thought, answer: '', offset: content.length };
  const rest = content.slice(close + 8);
  const answer = rest.trimStart();
  return { thought, answer, offset: content.length - answer.length };
}
