// The keyboard: one table for the keys and for the sheet that explains them.

import { $, element } from './dom.js';

const mac = /Mac|iPhone|iPad/.test(navigator.platform);
const CTRL = mac ? '⌘' : 'Ctrl';

const typing = (e) => e.target.closest?.('input, textarea, select, [contenteditable]') !== null;

// `actions`: functions by the names below.
export class Shortcuts {
  #rows;

  constructor(actions) {
    this.#rows = [
      { keys: ['Enter'], text: 'Send the message' },
      { keys: ['Shift', 'Enter'], text: 'New line' },
      { keys: ['↑'], text: 'Edit the last message (in the empty field)' },
      { keys: ['Esc'], text: 'Stop the answer; close what is open' },
      { keys: ['/'], text: 'To the message field', plain: '/', run: actions.focus },
      { keys: [CTRL, 'Shift', 'O'], text: 'New chat', ctrl: 'O', shift: true, run: actions.newChat },
      { keys: [CTRL, 'K'], text: 'Search the conversations', ctrl: 'K', run: actions.search },
      { keys: [CTRL, 'B'], text: 'Conversations', ctrl: 'B', run: actions.history },
      { keys: [CTRL, ','], text: 'Settings', ctrl: ',', run: actions.settings },
      { keys: [CTRL, 'Shift', 'L'], text: 'Colours: system, light, dark', ctrl: 'L', shift: true, run: actions.theme },
      { keys: [CTRL, 'Shift', 'Enter'], text: 'Retry the last answer', ctrl: 'ENTER', shift: true, run: actions.retry },
      { keys: [CTRL, 'Shift', 'Y'], text: 'Copy the last answer', ctrl: 'Y', shift: true, run: actions.copy },
      { keys: ['?'], text: 'This sheet', plain: '?', run: () => this.show() },
    ];
    $('help-close').addEventListener('click', () => $('help').close());
    $('help').addEventListener('click', (e) => {
      if (e.target === $('help')) $('help').close();
    });
    $('help-keys').replaceChildren(...this.#rows.flatMap(({ keys, text }) => {
      const term = element('dt');
      keys.forEach((key) => term.append(element('kbd', '', key)));
      return [term, element('dd', '', text)];
    }));
    addEventListener('keydown', (e) => this.#press(e));
  }

  show() {
    if (!$('help').open) $('help').showModal();
  }

  #press(e) {
    if (e.defaultPrevented || e.isComposing || e.altKey || $('help').open) return;
    const held = mac ? e.metaKey : e.ctrlKey;
    const key = e.key.toUpperCase();
    const row = this.#rows.find((r) => {
      if (r.plain) return !e.ctrlKey && !e.metaKey && !typing(e) && e.key === r.plain;
      return r.ctrl && held && r.ctrl === key && Boolean(r.shift) === e.shiftKey;
    });
    if (!row) return;
    e.preventDefault();
    row.run();
  }
}
