// Small helpers for the page's elements, the note at its lower edge, and copying.

const SVG = 'http://www.w3.org/2000/svg';

export const $ = (id) => document.getElementById(id);

export function element(tag, className, text) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined) e.textContent = text;
  return e;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(className, name, label, run) {
  const button = element('button', className);
  button.type = 'button';
  button.title = label;
  button.setAttribute('aria-label', label);
  button.append(icon(name));
  button.addEventListener('click', run);
  return button;
}

// Makes `wanted` the children of `list`. Elements that stay in their order are not touched: one of them may
// have the focus or be about to be clicked.
export function arrange(list, wanted) {
  const stays = new Set(wanted);
  for (const child of [...list.children]) if (!stays.has(child)) child.remove();
  wanted.forEach((child, i) => {
    if (list.children[i] !== child) list.insertBefore(child, list.children[i] ?? null);
  });
}

// crypto.randomUUID exists only with TLS.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, '0')).join('');
}

let toastTimer = 0;

// A note for a few seconds, with at most one thing to do about it.
export function toast(text, action, run) {
  const box = $('toast');
  box.replaceChildren(element('span', '', text));
  if (action) {
    const button = element('button', 'plain', action);
    button.type = 'button';
    button.addEventListener('click', () => {
      box.hidden = true;
      run();
    });
    box.append(button);
  }
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), action ? 8000 : 2500);
}

// Without TLS there is no navigator.clipboard: a hidden field and execCommand do the same.
function copyFromField(text) {
  const before = document.activeElement;
  const field = element('textarea', 'hidden');
  field.value = text;
  field.setAttribute('readonly', '');
  field.setAttribute('aria-hidden', 'true');
  (document.querySelector('dialog[open]') ?? document.body).append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  before?.focus?.({ preventScroll: true });
  return done;
}

// Copies and says so; `button`, if given, shows it too.
export async function copyText(text, button) {
  let done = false;
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      done = true;
    }
  } catch {
    // No permission: the older way may still work.
  }
  done ||= copyFromField(text);
  toast(done ? 'Copied' : 'The browser does not allow copying');
  if (!done || !button) return;
  button.classList.add('done');
  setTimeout(() => button.classList.remove('done'), 1500);
}
