// The little markdown that answers need: fenced code blocks, paragraphs and inline code.
//
// Nothing becomes HTML. Blocks and spans are ranges of the source, so that each character keeps its
// place and tokens can be found again. A block that is still being written only grows at its end.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;

function inlineSpans(text, start, end) {
  const spans = [];
  let at = start;
  const plain = (to) => to > at && spans.push({ start: at, end: to, code: false });
  for (let i = start; i < end; i++) {
    if (text[i] !== '`') continue;
    let ticks = 1;
    while (i + ticks < end && text[i + ticks] === '`') ticks++;
    const close = text.indexOf('`'.repeat(ticks), i + ticks);
    if (close < 0 || close + ticks > end) {
      i += ticks - 1;
      continue;
    }
    plain(i);
    spans.push({ start: i + ticks, end: close, code: true });
    at = close + ticks;
    i = at - 1;
  }
  plain(end);
  return spans;
}

// -> [{kind: 'code' | 'text', start, end, language, spans: [{start, end, code}]}]; start and end
// bound the whole block, spans what is shown of it.
export function parseBlocks(text) {
  const blocks = [];
  let fence = null; // {marker, block}
  let paragraph = null; // {start, end}
  const closeParagraph = () => {
    if (paragraph) blocks.push({ kind: 'text', ...paragraph, spans: inlineSpans(text, paragraph.start, paragraph.end) });
    paragraph = null;
  };
  let at = 0;
  while (at < text.length) {
    const newline = text.indexOf('\n', at);
    const end = newline < 0 ? text.length : newline;
    const line = text.slice(at, end);
    const mark = FENCE.exec(line);
    if (fence) {
      const closes = mark && mark[1].startsWith(fence.marker) && mark[2] === '';
      if (closes) {
        fence.block.end = end;
        fence = null;
      } else {
        const spans = fence.block.spans;
        if (spans.length === 0) spans.push({ start: at, end, code: true });
        else spans[0].end = end;
        fence.block.end = end;
      }
    } else if (mark) {
      closeParagraph();
      fence = { marker: mark[1], block: { kind: 'code', start: at, end, language: mark[2], spans: [] } };
      blocks.push(fence.block);
    } else if (line.trim() === '') {
      closeParagraph();
    } else {
      paragraph ??= { start: at, end };
      paragraph.end = end;
    }
    at = end + 1;
  }
  closeParagraph();
  return blocks;
}
