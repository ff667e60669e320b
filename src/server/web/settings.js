// The settings: a table of sampling controls, what they mean, and where they are kept.

const KEPT = 'freshet.settings';

// `blank`: what an empty field means; such a control is sent only when it holds something.
export const CONTROLS = [
  { name: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.05, value: 0.7, hint: '0 always takes the likeliest token.' },
  { name: 'top_p', label: 'Top-p', min: 0.01, max: 1, step: 0.01, value: 1 },
  { name: 'top_k', label: 'Top-k', min: 0, max: 200, step: 1, value: 0, hint: '0: all tokens.' },
  { name: 'min_p', label: 'Min-p', min: 0, max: 1, step: 0.01, value: 0 },
  { name: 'max_tokens', label: 'Max tokens', min: 1, step: 1, value: 1024, number: true, blank: 'no limit' },
  { name: 'seed', label: 'Seed', step: 1, value: '', number: true, blank: 'random' },
];

function element(tag, attributes, text) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  if (text !== undefined) e.textContent = text;
  return e;
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {}; // storage may be blocked
  }
}

export class Settings {
  #inputs = new Map(); // name -> [input, ...], all showing one value
  #form;

  constructor(form, parent) {
    this.#form = form;
    let pair = null;
    for (const control of CONTROLS) {
      if (control.number) {
        pair ??= parent.appendChild(element('div', { class: 'pair' }));
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
    const field = element('div', { class: 'field slider' });
    const range = element('input', { id: c.name, type: 'range', min: c.min, max: c.max, step: c.step });
    const exact = element('input', { type: 'number', min: c.min, max: c.max, step: 'any', 'aria-label': `${c.label}, exactly` });
    field.append(element('label', { for: c.name }, c.label), range, exact);
    if (c.hint) {
      const hint = element('p', { class: 'hint', id: `${c.name}-hint` }, c.hint);
      range.setAttribute('aria-describedby', hint.id);
      field.append(hint);
    }
    range.addEventListener('input', () => (exact.value = range.value));
    exact.addEventListener('input', () => (range.value = exact.value));
    this.#inputs.set(c.name, [exact, range]);
    return field;
  }

  #number(c) {
    const field = element('div', { class: 'field' });
    const input = element('input', { id: c.name, type: 'number', step: c.step, placeholder: c.blank, inputmode: 'numeric' });
    if (c.min !== undefined) input.min = c.min;
    field.append(element('label', { for: c.name }, c.label), input);
    this.#inputs.set(c.name, [input]);
    return field;
  }

  #show(values) {
    for (const c of CONTROLS) {
      for (const input of this.#inputs.get(c.name)) input.value = values[c.name] ?? c.value;
    }
    this.system.value = values.system ?? '';
    this.logprobs.checked = values.logprobs ?? true;
    this.heat.checked = values.heat ?? false;
  }

  #keep() {
    const values = { system: this.system.value, logprobs: this.logprobs.checked, heat: this.heat.checked };
    for (const c of CONTROLS) values[c.name] = this.#inputs.get(c.name)[0].value;
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
    const fields = {};
    for (const c of CONTROLS) {
      const text = this.#inputs.get(c.name)[0].value.trim();
      const value = Number(text);
      if (text !== '' && Number.isFinite(value)) fields[c.name] = c.step === 1 ? Math.trunc(value) : value;
      else if (!c.blank) fields[c.name] = c.value;
    }
    return fields;
  }
}
