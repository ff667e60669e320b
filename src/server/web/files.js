// Text files and pictures that go with a question: dropped on the page, pasted or chosen.
//
// A file is {name, text} or {name, picture}; `picture` is a data: URL.

import { $, element, icon, iconButton, toast } from './dom.js';

const MAX_BYTES = 1 << 20;
const MAX_PICTURE_BYTES = 20 << 20; // as the server has it
const PICTURES = ['image/png', 'image/jpeg', 'image/webp'];
const PICTURE = /^data:image\/(?:png|jpeg|webp);base64,[A-Za-z0-9+/=]+$/;

export const sizeText = (length) => (length < 1000 ? `${length} B` : `${(length / 1000).toFixed(length < 10_000 ? 1 : 0)} kB`);

async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 1 MiB`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    if (text.includes('\0')) throw new Error('binary');
    return text;
  } catch {
    throw new Error(`${file.name} is not a text file (UTF-8)`);
  }
}

async function readPicture(file) {
  if (file.size > MAX_PICTURE_BYTES) throw new Error(`${file.name} is larger than 20 MiB`);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

export const isPicture = (value) => typeof value === 'string' && PICTURE.test(value);

function pictureChip(file) {
  const chip = element('span', 'chip picture');
  const image = element('img');
  image.src = file.picture;
  image.alt = file.name;
  image.title = file.name;
  chip.append(image);
  return chip;
}

export function fileChip(file) {
  if (file.picture) return pictureChip(file);
  const chip = element('span', 'chip');
  chip.append(icon('file'), element('span', 'name', file.name), element('span', 'size', sizeText(file.text.length)));
  return chip;
}

export class Attachments {
  takesPictures = false;
  #files = [];
  #changed;

  constructor(changed) {
    this.#changed = changed;
    $('attach').addEventListener('click', () => $('attach-file').click());
    $('attach-file').addEventListener('change', async () => {
      await this.add([...$('attach-file').files]);
      $('attach-file').value = '';
      $('prompt').focus();
    });
    const carriesFiles = (e) => e.dataTransfer?.types.includes('Files');
    addEventListener('dragover', (e) => {
      if (!carriesFiles(e)) return;
      e.preventDefault();
      $('chat').classList.add('dropping');
    });
    addEventListener('dragleave', (e) => {
      if (!e.relatedTarget) $('chat').classList.remove('dropping');
    });
    addEventListener('drop', (e) => {
      $('chat').classList.remove('dropping');
      if (!carriesFiles(e)) return;
      e.preventDefault();
      this.add([...e.dataTransfer.files]);
    });
    $('prompt').addEventListener('paste', (e) => {
      const files = [...(e.clipboardData?.files ?? [])];
      if (files.length === 0) return;
      e.preventDefault();
      this.add(files);
    });
  }

  get empty() {
    return this.#files.length === 0;
  }

  async add(files) {
    for (const file of files) {
      try {
        this.#files.push(await this.#read(file));
      } catch (error) {
        toast(error.message);
      }
    }
    this.#show();
  }

  async #read(file) {
    if (!PICTURES.includes(file.type)) return { name: file.name, text: await readText(file) };
    if (!this.takesPictures) throw new Error('This model reads text only: it takes no pictures');
    return { name: file.name, picture: await readPicture(file) };
  }

  // -> the files, which are gone then
  take() {
    const files = this.#files;
    this.#files = [];
    this.#show();
    return files;
  }

  #show() {
    $('chips').replaceChildren(...this.#files.map((file) => {
      const chip = fileChip(file);
      chip.append(iconButton('act', 'close', `Remove ${file.name}`, () => {
        this.#files.splice(this.#files.indexOf(file), 1);
        this.#show();
        $('prompt').focus();
      }));
      return chip;
    }));
    $('chips').hidden = this.empty;
    this.#changed();
  }
}
