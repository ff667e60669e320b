// Maths in Markdown: $...$ and \(...\) in a line, $$...$$ and \[...\] as blocks.
//
// As in pandoc, an opening $ has no space after it, a closing one no space before it and no digit after
// it: "$5 and $10" are amounts. The rules only find the TeX; markdown.js shows it.

const SPACE = /\s/;
const MAX_TEX = 8000; // characters; what is longer is text
const MAX_LINES = 60;

function closingDollar(source, from, end) {
  for (let at = from; at < end; at++) {
    const c = source[at];
    if (c === '\\') at++;
    else if (c === '$') {
      const ends = !SPACE.test(source[at - 1]) && !/\d/.test(source[at + 1] ?? '');
      return ends ? at : -1;
    }
  }
  return -1;
}

// -> [TeX begins, TeX ends, everything ends, as a block], or null
function mathAt(source, at, end) {
  const pair = source.slice(at, at + 2);
  const closers = { '\\(': '\\)', '\\[': '\\]', $$: '$$' };
  if (closers[pair]) {
    const close = at + 2 + source.slice(at + 2, at + 2 + MAX_TEX).indexOf(closers[pair]);
    if (close < at + 2 || close + 2 > end || source.slice(at + 2, close).trim() === '') return null;
    return [at + 2, close, close + 2, pair !== '\\('];
  }
  if (source[at] !== '$' || at + 1 >= end || SPACE.test(source[at + 1])) return null;
  const close = closingDollar(source, at + 1, end);
  return close > at + 1 ? [at + 1, close, close + 1, false] : null;
}

function inlineRule(state, silent) {
  const first = state.src[state.pos];
  if (first !== '$' && first !== '\\') return false;
  const found = mathAt(state.src, state.pos, state.posMax);
  if (!found) {
    // "$$" that nothing closes must not be taken for the beginning of "$...".
    if (!state.src.startsWith('$$', state.pos)) return false;
    if (!silent) state.pending += '$$';
    state.pos += 2;
    return true;
  }
  if (!silent) {
    const token = state.push('math', 'math', 0);
    token.content = state.src.slice(found[0], found[1]);
    token.meta = { display: found[3] };
  }
  state.pos = found[2];
  return true;
}

function blockRule(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const opener = state.src.slice(begin, begin + 2);
  const closer = { $$: '$$', '\\[': '\\]' }[opener];
  if (!closer || state.sCount[startLine] - state.blkIndent >= 4) return false;
  let line = startLine;
  let from = begin + 2;
  for (; line < Math.min(endLine, startLine + MAX_LINES); line++) {
    if (line > startLine) {
      from = state.bMarks[line] + state.tShift[line];
      if (from < state.eMarks[line] && state.sCount[line] < state.blkIndent) return false;
    }
    const close = state.src.slice(from, state.eMarks[line]).indexOf(closer);
    if (close < 0) continue;
    if (state.src.slice(from + close + 2, state.eMarks[line]).trim() !== '') return false;
    const text = state.getLines(startLine, line + 1, state.tShift[startLine], false).trim();
    const tex = text.slice(2, -2);
    if (tex.trim() === '') return false;
    if (silent) return true;
    state.line = line + 1;
    const token = state.push('math', 'math', 0);
    token.block = true;
    token.content = tex;
    token.meta = { display: true };
    token.map = [startLine, state.line];
    return true;
  }
  return false;
}

export function addMath(md) {
  md.inline.ruler.before('escape', 'math', inlineRule);
  md.block.ruler.before('fence', 'math', blockRule, { alt: ['paragraph', 'reference', 'blockquote', 'list'] });
}
