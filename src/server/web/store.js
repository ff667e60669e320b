// Keeps conversations in this browser (IndexedDB). Where that is blocked they last as long as the page.

import { merged } from './conversation.js';

const NAME = 'conversations';

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  lasting = true;
  #db = null;
  #opened = null; // resolves when `#db` is set or cannot be had
  #memory = new Map();
  #removed = new Set(); // an answer may still be running when its conversation is deleted
  #channel = typeof BroadcastChannel === 'function' ? new BroadcastChannel('freshet') : null;

  // `changed` is called when another tab has changed something. What is asked for before the database is open
  // waits for it.
  open(changed) {
    if (this.#channel) this.#channel.onmessage = changed;
    this.#opened = this.#open();
    return this.#opened;
  }

  async #open() {
    try {
      const request = indexedDB.open('freshet', 1);
      request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: 'id' });
      this.#db = await done(request);
      this.#db.onversionchange = () => this.#db.close();
    } catch {
      this.lasting = false;
    }
  }

  #objects(mode) {
    return this.#db.transaction(NAME, mode).objectStore(NAME);
  }

  // All records, the newest first.
  async all() {
    await this.#opened;
    const records = this.#db ? await done(this.#objects('readonly').getAll()) : [...this.#memory.values()];
    return records.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    await this.#opened;
    return (this.#db ? await done(this.#objects('readonly').get(id)) : this.#memory.get(id)) ?? null;
  }

  // `quiet`: other tabs need not know.
  async put(record, quiet = false) {
    await this.#opened;
    if (this.#removed.has(record.id)) return;
    if (this.#db) {
      const objects = this.#objects('readwrite');
      const before = await done(objects.get(record.id));
      await done(objects.put(merged(before, record)));
    } else {
      this.#memory.set(record.id, structuredClone(record));
    }
    if (!quiet) this.#channel?.postMessage('changed');
  }

  // Puts what comes from a file, or what was deleted.
  async restore(record) {
    this.#removed.delete(record.id);
    await this.put(record);
  }

  async remove(id) {
    this.#removed.add(id);
    await this.#opened;
    if (this.#db) await done(this.#objects('readwrite').delete(id));
    else this.#memory.delete(id);
    this.#channel?.postMessage('changed');
  }

  async clear() {
    for (const { id } of await this.all()) this.#removed.add(id);
    if (this.#db) await done(this.#objects('readwrite').clear());
    else this.#memory.clear();
    this.#channel?.postMessage('changed');
  }
}
