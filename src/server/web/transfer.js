// Conversations as files: JSON with all branches, or Markdown of the branch that is shown.
//
// Comments mark the messages in Markdown, since a message may hold any heading; a line of a message that
// looks like such a comment gets a backslash.

import { Conversation, splitThought, spokenText } from './conversation.js';

const FORMAT = 'freshet.conversations';
const MAX_BYTES = 64 << 20;
const MARK = /^<!-- freshet:(user|assistant|thought)(?: model="([^"]*)")? -->$/;
const LOOKS_LIKE = /^(\\*)<!-- freshet:/;

const escaped = (text) => text.split('\n').map((l) => (LOOKS_LIKE.test(l) ? `\\${l}` : l)).join('\n');
const unescaped = (line) => (LOOKS_LIKE.test(line) && line[0] === '\\' ? line.slice(1) : line);

export function toJson(records) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations: records }, null, 1);
}

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title.replace(/\s+/g, ' ')}`];
  for (const node of conversation.path()) {
    const model = node.model.replace(/["<>\n]/g, '');
    if (node.role === 'user') {
      parts.push('<!-- freshet:user -->\n## You', escaped(spokenText(node)));
      continue;
    }
    parts.push(`<!-- freshet:assistant model="${model}" -->\n## ${model || 'Answer'}`);
    const { thought, answer } = splitThought(node);
    if (thought !== '') {
      parts.push(`<details><summary>Thoughts</summary>\n\n<!-- freshet:thought -->\n${escaped(thought)}\n\n</details>`);
    }
    parts.push(`<!-- freshet:assistant -->\n${escaped(answer)}`);
  }
  return `${parts.join('\n\n')}\n`;
}

export function fromMarkdown(text) {
  const conversation = new Conversation();
  const title = /^# (.+)$/m.exec(text)?.[1].trim() ?? '';
  let node = null;
  let into = '';
  let lines = [];
  const flush = () => {
    let body = lines.join('\n').trim();
    if (into === 'thought') body = body.replace(/\s*<\/details>$/, '');
    if (into !== '') node[into] = body;
    lines = [];
  };
  for (const line of text.replace(/\r\n?/g, '\n').split('\n')) {
    const mark = MARK.exec(line);
    if (!mark) {
      lines.push(unescaped(line));
      continue;
    }
    const [, kind, model] = mark;
    flush();
    if (kind === 'thought') {
      into = 'thought';
    } else if (kind === 'assistant' && model === undefined && node?.role === 'assistant') {
      into = 'content';
    } else {
      node = conversation.add(kind, node, { model: model ?? '' });
      into = kind === 'user' ? 'content' : '';
    }
  }
  flush();
  const path = conversation.path();
  if (path.length === 0) throw new Error('it holds no messages: only Markdown that was exported here can be read');
  for (const n of path) if (n.role === 'user') n.content = n.content.replace(/^## You\n*/, '');
  conversation.title = title.slice(0, 200);
  conversation.named = true;
  return conversation.record();
}

export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error('it is neither JSON nor Markdown that was exported here');
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error(`its "format" is not "${FORMAT}"`);
  }
  if (data.version !== 1) throw new Error('a newer version of this page has written it');
  return data.conversations.map((record) => Conversation.from(record).record());
}

// -> records. Throws an Error that names the file.
export async function readFile(file) {
  try {
    if (file.size > MAX_BYTES) throw new Error('it is larger than 64 MiB');
    const text = await file.text();
    return /^\s*\{/.test(text) ? fromJson(text) : [fromMarkdown(text)];
  } catch (error) {
    throw new Error(`${file.name} was not imported: ${error.message}.`);
  }
}

export function download(name, type, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function fileName(title, suffix) {
  const base = title.normalize('NFKC').replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 60);
  return `${base || 'conversation'}.${suffix}`;
}
