// The panels beside the chat. Settings and the live view share one side. In a narrow window panels lie over
// the chat, one at a time, and all are closed at first.

import { $ } from './dom.js';

const KEPT = 'freshet.panels';
const NAMES = ['history', 'settings', 'live'];
const RIVALS = { settings: 'live', live: 'settings' };

export class Panels {
  #wide = matchMedia('(min-width: 1000px)');
  #opened;

  // `opened(name, on)` is called for each change.
  constructor(opened) {
    this.#opened = opened;
    for (const name of NAMES) {
      $(`toggle-${name}`).addEventListener('click', () => this.toggle(name));
    }
    for (const button of document.querySelectorAll('[data-closes]')) {
      button.addEventListener('click', () => this.close(button.dataset.closes));
    }
    $('shade').addEventListener('click', () => this.closeOne());
    this.#wide.addEventListener('change', () => this.arrange());
  }

  get wide() {
    return this.#wide.matches;
  }

  isOpen(name) {
    return !$(name).hidden;
  }

  arrange() {
    let kept = { history: true };
    try {
      kept = JSON.parse(localStorage.getItem(KEPT)) ?? kept;
    } catch {
      // Storage may be blocked.
    }
    for (const name of NAMES) this.#set(name, this.wide && kept[name] === true);
  }

  #set(name, on) {
    $(name).hidden = !on;
    $(`toggle-${name}`).setAttribute('aria-expanded', String(on));
    $('shade').hidden = this.wide || !NAMES.some((n) => this.isOpen(n));
    this.#opened(name, on);
  }

  open(name, on = true) {
    const rivals = this.wide ? [RIVALS[name]] : NAMES.filter((n) => n !== name);
    if (on) rivals.filter((n) => n && this.isOpen(n)).forEach((n) => this.#set(n, false));
    this.#set(name, on);
    if (!this.wide) return;
    try {
      localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(NAMES.map((n) => [n, this.isOpen(n)]))));
    } catch {
      // Then it lasts as long as the page.
    }
  }

  toggle(name) {
    this.open(name, !this.isOpen(name));
  }

  close(name) {
    this.open(name, false);
    $(`toggle-${name}`).focus();
  }

  // Closes a panel that lies over the chat. -> whether there was one
  closeOne() {
    const name = this.wide ? undefined : NAMES.find((n) => this.isOpen(n));
    if (name) this.close(name);
    return Boolean(name);
  }
}
