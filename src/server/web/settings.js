// The settings: a table of sampling controls, what they mean, and where they are kept. A request holds what
// the user has set and, for the rest, the defaults that run and chat use, too: chat_sampling of /props.

import { element } from './dom.js';

const KEPT = 'freshet.options';

// `unset`: where the slider stands as long as nothing is known.
export const CONTROLS = [
  { name: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.05, unset: 1, hint: '0 always takes the likeliest token.' },
  { name: 'top_p', label: 'Top-p', min: 0.01, max: 1, step: 0.01, unset: 1 },
  { name: 'top_k', label: 'Top-k', min: 0, max: 200, step: 1, unset: 0, hint: '0: all tokens.' },
  { name: 'min_p', label: 'Min-p', min: 0, max: 1, step: 0.01, unset: 0 },
  { name: 'repetition_penalty', label: 'Repetition penalty', min: 0.8, max: 1.5, step: 0.01, unset: 1 },
  { name: 'max_tokens', label: 'Max tokens', min: 1, step: 1, number: true, blank: 'no limit' },
  { name: 'seed', label: 'Seed', step: 1, number: true, blank: 'random' },
];

function field(tag, className, attributes) {
  const e = element(tag, className);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  return e;
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {}; // storage may be blocked
  }
}

const shown = (value) => String(+Number(value).toFixed(4));

export class Settings {
  #inputs = new Map(); // name -> {exact, range}; an empty `exact` is not set
  #defaults = {}; // by the names of the API
  #form;

  constructor(form, parent) {
    this.#form = form;
    let pair = null;
    for (const control of CONTROLS) {
      if (control.number) {
        pair ??= parent.appendChild(element('div', 'pair'));
        pair.append(this.#number(control));
      } else {
        parent.append(this.#slider(control));
      }
    }
    this.system = form.querySelector('#system');
    this.logprobs = form.querySelector('#logprobs');
    this.heat = form.querySelector('#heat');
    form.addEventListener('submit', (e) => e.preventDefault());
    form.addEventListener('input', () => this.#keep());
    form.querySelector('#reset').addEventListener('click', () => {
      this.#show({});
      this.#keep();
      form.dispatchEvent(new Event('change'));
    });
    this.#show(read());
  }

  #slider(c) {
    const box = element('div', 'field slider');
    const range = field('input', '', { id: c.name, type: 'range', min: c.min, max: c.max, step: c.step });
    const exact = field('input', '', { type: 'number', min: c.min, max: c.max, step: 'any', 'aria-label': `${c.label}, exactly`, placeholder: 'default' });
    const label = element('label', '', c.label);
    label.htmlFor = c.name;
    box.append(label, range, exact);
    if (c.hint) {
      const hint = element('p', 'hint', c.hint);
      hint.id = `${c.name}-hint`;
      range.setAttribute('aria-describedby', hint.id);
      box.append(hint);
    }
    range.addEventListener('input', () => {
      exact.value = range.value;
      this.#mark(c);
    });
    exact.addEventListener('input', () => this.#mark(c));
    this.#inputs.set(c.name, { exact, range, box });
    return box;
  }

  #number(c) {
    const box = element('div', 'field');
    const exact = field('input', '', { id: c.name, type: 'number', step: c.step, placeholder: c.blank, inputmode: 'numeric' });
    if (c.min !== undefined) exact.min = c.min;
    const label = element('label', '', c.label);
    label.htmlFor = c.name;
    box.append(label, exact);
    this.#inputs.set(c.name, { exact, range: null, box });
    return box;
  }

  // Where nothing is set the slider stands at the default.
  #mark(c) {
    const { exact, range, box } = this.#inputs.get(c.name);
    box.classList.toggle('set', exact.value !== '');
    if (range) range.value = exact.value !== '' ? exact.value : this.#defaults[c.name] ?? c.unset;
  }

  // `params`: chat_sampling of /props.
  setDefaults(params) {
    this.#defaults = params;
    for (const c of CONTROLS) {
      const value = params[c.name];
      if (c.number || !Number.isFinite(value)) continue;
      this.#inputs.get(c.name).exact.placeholder = shown(value);
      this.#mark(c);
    }
  }

  #show(values) {
    for (const c of CONTROLS) {
      this.#inputs.get(c.name).exact.value = values[c.name] ?? '';
      this.#mark(c);
    }
    this.system.value = values.system ?? '';
    this.logprobs.checked = values.logprobs === true;
    this.heat.checked = values.heat === true;
  }

  #keep() {
    const values = { system: this.system.value, logprobs: this.logprobs.checked, heat: this.heat.checked };
    for (const c of CONTROLS) values[c.name] = this.#inputs.get(c.name).exact.value;
    try {
      localStorage.setItem(KEPT, JSON.stringify(values));
    } catch {
      // Then they last as long as the page.
    }
  }

  onChange(run) {
    this.#form.addEventListener('input', run);
    this.#form.addEventListener('change', run);
  }

  // The fields of a request.
  sampling() {
    const fields = { ...this.#defaults };
    for (const c of CONTROLS) {
      const text = this.#inputs.get(c.name).exact.value.trim();
      const value = Number(text);
      if (text !== '' && Number.isFinite(value)) fields[c.name] = c.step === 1 ? Math.trunc(value) : value;
    }
    return fields;
  }
}
