// The list of conversations: search, rename, delete, export, import.

import { Conversation } from './conversation.js';
import { $, arrange, element, icon, iconButton, toast } from './dom.js';
import { download, fileName, readFile, toJson, toMarkdown } from './transfer.js';

const DAY = 86_400_000;

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return 'Today';
  if (time >= midnight - DAY) return 'Yesterday';
  if (time >= midnight - 7 * DAY) return 'Last 7 days';
  return new Date(time).toLocaleDateString(undefined, { year: 'numeric', month: 'long' });
}

// The words around the first hit, for the list.
function excerpt(record, words) {
  for (const { content } of record.nodes) {
    const at = content.toLowerCase().indexOf(words[0]);
    if (at < 0) continue;
    const from = Math.max(0, at - 24);
    return `${from > 0 ? '…' : ''}${content.slice(from, at + 60).replace(/\s+/g, ' ')}`;
  }
  return '';
}

export class History {
  #store;
  #select;
  #current = '';
  #menu = $('menu');
  #renaming = false;
  #refreshes = 0;
  #ages = new Map(); // age -> its heading in the list
  #entries = new Map(); // id -> {key, item}: what is in the list, and what it shows

  // `select(id or null)` shows a conversation, or a new one.
  constructor(store, select) {
    this.#store = store;
    this.#select = select;
    $('search').addEventListener('input', () => this.refresh());
    $('import').addEventListener('click', () => $('import-file').click());
    $('import-file').addEventListener('change', () => this.#import());
    $('all-menu').addEventListener('click', (e) => this.#openMenu(e.currentTarget, this.#forAll()));
    this.#menu.addEventListener('keydown', (e) => this.#walk(e));
  }

  set current(id) {
    this.#current = id;
    for (const item of $('conversations').querySelectorAll('.entry')) this.#mark(item);
  }

  #mark(item) {
    item.classList.toggle('current', item.dataset.id === this.#current);
    const button = item.querySelector('.open');
    if (item.dataset.id === this.#current) button?.setAttribute('aria-current', 'true');
    else button?.removeAttribute('aria-current');
  }

  async refresh() {
    if (this.#renaming) return;
    const words = $('search').value.toLowerCase().split(/\s+/).filter((w) => w !== '');
    const turn = ++this.#refreshes;
    const all = await this.#store.all();
    if (turn !== this.#refreshes || this.#renaming) return;
    const has = (r, w) => r.title.toLowerCase().includes(w) || r.nodes.some((n) => n.content.toLowerCase().includes(w));
    const found = all.filter((r) => words.every((w) => has(r, w)));
    const list = $('conversations');
    const groups = [];
    const ages = new Map();
    const entries = new Map();
    let age = '';
    for (const record of found) {
      if (ageOf(record.updated) !== age) {
        age = ageOf(record.updated);
        groups.push(this.#ages.get(age) ?? element('li', 'age', age));
        ages.set(age, groups.at(-1));
      }
      const { id } = record;
      const part = words.length > 0 ? excerpt(record, words) : '';
      const key = `${record.title}\0${part}`;
      const old = this.#entries.get(id);
      entries.set(id, old?.key === key ? old : { key, item: this.#entry(record, part) });
      groups.push(entries.get(id).item);
    }
    this.#ages = ages;
    this.#entries = entries;
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    arrange(list, groups);
    if (focused && document.activeElement !== focused) {
      this.#item(focused.closest('.entry')?.dataset.id)?.querySelector(`.${focused.classList[0]}`)?.focus();
    }
    const empty = words.length > 0 ? 'Nothing found.' : 'Conversations are kept in this browser.';
    const blocked = 'This browser keeps nothing for this page: conversations last until it is closed.';
    $('history-note').textContent = !this.#store.lasting ? blocked : found.length === 0 ? empty : '';
    $('history-note').hidden = $('history-note').textContent === '';
  }

  #item(id) {
    return [...$('conversations').querySelectorAll('.entry')].find((item) => item.dataset.id === id);
  }

  #entry(record, part) {
    const item = element('li', 'entry');
    item.dataset.id = record.id;
    const button = element('button', 'open');
    button.type = 'button';
    button.title = record.title;
    button.append(element('span', 'title', record.title));
    if (part !== '') button.append(element('span', 'excerpt', part));
    button.addEventListener('click', () => this.#select(record.id));
    const more = iconButton('act more', 'more', `More for “${record.title}”`, () =>
      this.#openMenu(more, this.#forOne(record)));
    more.setAttribute('aria-haspopup', 'menu');
    item.append(button, more);
    this.#mark(item);
    return item;
  }

  // --- menus

  #forOne(record) {
    const fresh = () => this.#store.get(record.id);
    return [
      ['edit', 'Rename', () => this.#rename(record)],
      ['save', 'Export as Markdown', async () => {
        const text = toMarkdown(Conversation.from(await fresh()));
        download(fileName(record.title, 'md'), 'text/markdown', text);
      }],
      ['save', 'Export as JSON', async () =>
        download(fileName(record.title, 'json'), 'application/json', toJson([await fresh()]))],
      ['delete', 'Delete', () => this.#remove(record.id)],
    ];
  }

  #forAll() {
    return [
      ['save', 'Export all as JSON', async () =>
        download('conversations.json', 'application/json', toJson(await this.#store.all()))],
      ['delete', 'Delete all', async () => {
        const all = await this.#store.all();
        await this.#store.clear();
        this.#select(null);
        this.#offerBack('All conversations deleted', all);
      }],
    ];
  }

  #openMenu(anchor, rows) {
    this.#menu.replaceChildren(...rows.map(([name, label, run]) => {
      const row = element('button', name === 'delete' ? 'danger' : '');
      row.type = 'button';
      row.setAttribute('role', 'menuitem');
      row.append(icon(name), element('span', '', label));
      row.addEventListener('click', () => {
        this.#menu.hidePopover();
        run();
      });
      return row;
    }));
    this.#menu.showPopover();
    const box = anchor.getBoundingClientRect();
    const { width, height } = this.#menu.getBoundingClientRect();
    this.#menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.#menu.style.top = `${Math.max(8, Math.min(box.bottom + 4, innerHeight - height - 8))}px`;
    this.#menu.firstChild.focus();
  }

  #walk(e) {
    const rows = [...this.#menu.children];
    const step = { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if (!step) return;
    e.preventDefault();
    rows[(rows.indexOf(document.activeElement) + step + rows.length) % rows.length].focus();
  }

  // --- what they do

  #rename(record) {
    const item = this.#item(record.id);
    if (!item) return;
    this.#renaming = true;
    const field = element('input', 'rename');
    field.value = record.title;
    field.maxLength = 200;
    field.setAttribute('aria-label', 'New name');
    const end = async (keep) => {
      if (!this.#renaming) return;
      this.#renaming = false;
      const title = field.value.trim();
      if (keep && title !== '') {
        const fresh = await this.#store.get(record.id);
        if (fresh) await this.#store.put({ ...fresh, title, named: true });
        this.onRename?.(record.id, title);
      }
      await this.refresh();
    };
    field.addEventListener('keydown', (e) => {
      if (e.key === 'Enter') end(true);
      if (e.key === 'Escape') end(false);
      e.stopPropagation();
    });
    field.addEventListener('blur', () => end(true));
    this.#entries.delete(record.id); // it is drawn anew in the end
    item.replaceChildren(field);
    field.focus();
    field.select();
  }

  async #remove(id) {
    const record = await this.#store.get(id);
    await this.#store.remove(id);
    if (id === this.#current) this.#select(null);
    this.#offerBack('Conversation deleted', record ? [record] : []);
  }

  #offerBack(text, records) {
    this.refresh();
    toast(text, 'Undo', async () => {
      for (const record of records) await this.#store.restore(record);
      this.refresh();
    });
  }

  async #import() {
    const field = $('import-file');
    let count = 0;
    let last = null;
    try {
      for (const file of field.files) {
        for (const record of await readFile(file)) {
          await this.#store.restore(record);
          last = record.id;
          count++;
        }
      }
      toast(count === 1 ? 'Imported 1 conversation' : `Imported ${count} conversations`);
    } catch (error) {
      toast(error.message, 'Close', () => {});
    }
    field.value = '';
    await this.refresh();
    if (last) this.#select(last);
  }
}
