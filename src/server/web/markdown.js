// Markdown (CommonMark, tables, strikethrough, maths) as elements.
//
// No text ever becomes HTML: the parser's tokens become elements of the kinds listed here, links lead to
// http, https and mailto only, pictures are shown as links (nothing is loaded from elsewhere). What would
// take too long is shown as plain text.

import MarkdownIt from './vendor/markdown-it.js';
import { copyText, element, iconButton } from './dom.js';
import { addMath } from './math_rules.js';

const MAX_TEXT = 300_000; // characters of a message that are parsed
const MAX_PARAGRAPH = 10_000;
const MAX_CELLS = 30_000; // of a table
const MAX_COLUMNS = 100;
const DELIMITERS = /^[\s>|:-]+$/; // the row below the head
const MAX_TOKENS = 40_000; // of a block
const MAX_CODE = 20_000; // characters of a block that is coloured
const SLOW_CODE = /[\w\s&*:<>~]{1500}/; // words without a sign: some grammars take square time
const MAX_TEX = 8000;
const MAX_NESTING = 40; // the parser drops what lies deeper
const LINK = /^(https?:\/\/|mailto:)/i;
// With definitions a short formula can expand for ever.
const DEFINES = /\\(?:[gex]?def|(?:re)?newcommand|providecommand|(?:re)?newenvironment|let|futurelet|global)(?![a-z])/i;

const md = new MarkdownIt({ html: false, linkify: true, maxNesting: MAX_NESTING });
md.validateLink = (url) => LINK.test(url.trim());
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
addMath(md);

// A row may be shorter than the head and is filled up: the size of a table is not that of its text.
const tableRule = md.block.ruler.__rules__.find((r) => r.name === 'table').fn;
md.block.ruler.at('table', (state, startLine, endLine, silent) => {
  if (startLine + 2 > endLine) return false;
  const head = state.src.slice(state.bMarks[startLine], state.eMarks[startLine]);
  const second = state.src.slice(state.bMarks[startLine + 1], state.eMarks[startLine + 1]);
  if (!head.includes('|') || !DELIMITERS.test(second)) return false;
  const columns = head.split('|', MAX_COLUMNS + 2).length;
  if (columns > MAX_COLUMNS + 1) return false;
  const known = state.env.filled; // lines up to the next empty one: each line may be tried
  if (!known || startLine < known.from || startLine >= known.to) {
    let to = startLine + 1;
    while (to < endLine && !state.isEmpty(to)) to++;
    state.env.filled = { from: startLine, to };
  }
  if ((state.env.filled.to - startLine) * columns > MAX_CELLS) return false;
  return tableRule(state, startLine, endLine, silent);
}, { alt: ['paragraph', 'reference'] });

// Some marks take time that grows with the square of a paragraph's length.
const inlineRule = md.core.ruler.__rules__.find((r) => r.name === 'inline').fn;
md.core.ruler.at('inline', (state) => {
  const long = state.tokens.filter((t) => t.type === 'inline' && t.content.length > MAX_PARAGRAPH);
  for (const token of long) {
    token.type = 'text';
    token.children = null;
  }
  inlineRule(state);
});

// --- libraries that most answers do not need

const libraries = new Map(); // path -> module, null while it is loading
let arrived = () => {};

// `run` is called when a library came and blocks that wait for it can be drawn again.
export function onLibrary(run) {
  arrived = run;
}

function library(path) {
  if (!libraries.has(path)) {
    libraries.set(path, null);
    import(path).then((module) => {
      libraries.set(path, module.default);
      arrived();
    }, () => libraries.delete(path));
  }
  return libraries.get(path);
}

// --- code and maths

const ENTITIES = { '&amp;': '&', '&lt;': '<', '&gt;': '>', '&quot;': '"', '&#x27;': "'", '&#39;': "'" };

// highlight.js answers with spans of classes and escaped text, and nothing else is understood here.
function coloured(parent, html) {
  const stack = [parent];
  for (const part of html.split(/(<span class="[^"]*">|<\/span>)/)) {
    if (part.startsWith('<span class="')) {
      const span = element('span', part.slice(13, -2));
      stack.at(-1).append(span);
      stack.push(span);
    } else if (part === '</span>') {
      if (stack.length > 1) stack.pop();
    } else if (part !== '') {
      stack.at(-1).append(part.replace(/&(?:amp|lt|gt|quot|#x27|#39);/g, (e) => ENTITIES[e]));
    }
  }
}

function codeBlock(text, info, waits) {
  const language = info.trim().split(/\s+/)[0].slice(0, 40);
  const source = text.replace(/\n$/, '');
  const box = element('div', 'codeblock');
  const head = element('div', 'codehead');
  head.append(element('span', '', language));
  const copy = iconButton('act', 'copy', 'Copy code', () => copyText(source, copy));
  head.append(copy);
  const pre = element('pre');
  pre.tabIndex = 0;
  pre.setAttribute('role', 'region');
  pre.setAttribute('aria-label', language ? `Code, ${language}` : 'Code');
  const code = element('code');
  const hljs = language !== '' && source.length <= MAX_CODE && !SLOW_CODE.test(source) ? library('./vendor/highlight.js') : undefined;
  if (hljs === null) waits.library = true;
  if (hljs?.getLanguage(language)) coloured(code, hljs.highlight(language, source, true).value);
  else code.textContent = source;
  pre.append(code);
  box.append(head, pre);
  return box;
}

function maths(tex, display, waits) {
  const box = element('span', display ? 'math block' : 'math');
  const katex = library('./vendor/katex.js');
  if (katex === null) waits.library = true;
  try {
    if (!katex || tex.length > MAX_TEX || DEFINES.test(tex)) throw new Error('shown as it is');
    katex.render(tex, box, {
      output: 'mathml', displayMode: display, throwOnError: true, strict: 'ignore', trust: false,
      maxExpand: 300, maxSize: 20,
    });
    box.querySelector('math')?.setAttribute('tabindex', '0');
  } catch {
    box.replaceChildren(element('code', 'tex', tex.trim()));
  }
  return box;
}

// --- tokens to elements

const SIMPLE = new Set(['p', 'blockquote', 'ul', 'li', 'thead', 'tbody', 'tr', 'em', 'strong', 's']);

function opened(token) {
  const { tag } = token;
  if (SIMPLE.has(tag)) return element(tag);
  if (/^h[1-6]$/.test(tag)) return element(`h${Math.min(6, Number(tag[1]) + 2)}`, `size${tag[1]}`);
  if (tag === 'ol') {
    const list = element('ol');
    const start = Number(token.attrGet('start') ?? 1);
    if (start !== 1) list.start = start;
    return list;
  }
  if (tag === 'table') return element('table');
  if (tag === 'th' || tag === 'td') {
    const align = /text-align:(left|right|center)/.exec(token.attrGet('style') ?? '');
    return element(tag, align ? align[1] : '');
  }
  if (tag === 'a') {
    const href = token.attrGet('href') ?? '';
    if (!LINK.test(href)) return element('span');
    const link = element('a');
    link.href = href;
    link.target = '_blank';
    link.rel = 'noopener noreferrer';
    link.title = token.attrGet('title') ?? '';
    if (link.title === '') link.removeAttribute('title');
    return link;
  }
  return element('span');
}

function single(parent, token, waits) {
  switch (token.type) {
    case 'inline': return fill(parent, token.children, waits);
    case 'text': return parent.append(token.content);
    case 'code_inline': return parent.append(element('code', '', token.content));
    case 'softbreak':
    case 'hardbreak': return parent.append(element('br'));
    case 'hr': return parent.append(element('hr'));
    case 'fence':
    case 'code_block': return parent.append(codeBlock(token.content, token.info ?? '', waits));
    case 'math': return parent.append(maths(token.content, token.meta.display, waits));
    case 'image': {
      const link = opened({ tag: 'a', attrGet: (name) => token.attrGet(name === 'href' ? 'src' : name) });
      link.append(token.content || 'picture');
      return parent.append(link);
    }
    default: return parent.append(token.content);
  }
}

function fill(parent, tokens, waits) {
  const stack = [parent];
  for (const token of tokens) {
    if (token.nesting === 0) {
      single(stack.at(-1), token, waits);
    } else if (token.nesting < 0) {
      stack.pop();
    } else if (token.hidden) {
      stack.push(stack.at(-1)); // a paragraph in a tight list
    } else {
      const child = opened(token);
      if (token.tag === 'table') {
        const frame = element('div', 'tableframe');
        frame.tabIndex = 0;
        frame.setAttribute('role', 'region');
        frame.setAttribute('aria-label', 'Table');
        frame.append(child);
        stack.at(-1).append(frame);
      } else {
        stack.at(-1).append(child);
      }
      stack.push(child);
    }
  }
}

function lineStarts(text) {
  const starts = [0];
  for (const end of text.matchAll(/\r\n?|\n/g)) starts.push(end.index + end[0].length);
  starts.push(text.length);
  return starts;
}

const sizeOf = (tokens) => tokens.reduce((sum, t) => sum + 1 + (t.children?.length ?? 0), 0);

// -> [{start, end, draw}]: the outermost blocks and where they lie in the text. draw() -> {node, waits}; a
// block with `waits` wants to be drawn again when a library has come.
export function blocksOf(text) {
  const plain = () => ({ node: element('p', 'plaintext', text), waits: false });
  if (text.trim() === '') return [];
  if (text.length > MAX_TEXT) return [{ start: 0, end: text.length, context: '', draw: plain }];
  let tokens;
  const env = {};
  try {
    tokens = md.parse(text, env);
  } catch {
    return [{ start: 0, end: text.length, context: '', draw: plain }];
  }
  const context = JSON.stringify(env.references ?? {}); // links may be defined further down
  const starts = lineStarts(text);
  const blocks = [];
  let from = 0;
  let depth = 0;
  tokens.forEach((token, i) => {
    depth += token.nesting;
    if (depth > 0) return;
    const part = tokens.slice(from, i + 1);
    const [first, last] = part[0].map ?? [0, starts.length - 1];
    const start = starts[first];
    const end = starts[Math.min(last, starts.length - 1)];
    blocks.push({ start, end, context, draw: () => drawn(part, text.slice(start, end)) });
    from = i + 1;
  });
  return blocks;
}

function drawn(tokens, source) {
  const deep = tokens.some((t) => t.level >= MAX_NESTING - 1);
  if (deep || sizeOf(tokens) > MAX_TOKENS) return { node: element('p', 'plaintext', source), waits: false };
  const waits = { library: false };
  const box = document.createDocumentFragment();
  fill(box, tokens, waits);
  const node = box.childNodes.length === 1 && box.firstChild instanceof HTMLElement ? box.firstChild : element('div');
  if (node !== box.firstChild) node.append(box);
  return { node, waits: waits.library };
}
