// A line chart over the last minute, drawn on a canvas in the page's colours.

import { element } from './dom.js';

const WINDOW_MS = 60_000;

// The next of 1, 2, 2.5, 5 times a power of ten.
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 2.5, 5, 10]) {
    if (value <= step * power * 1.0001) return step * power;
  }
  return 10 * power;
}

export class LineChart {
  #points = []; // {t, values: [number | null]}
  #pointer = null; // distance from the right edge, 0..1

  // `lines`: [{name, color}], color a CSS variable. `max`: a fixed top of the scale; `least`: the
  // lowest that it may have.
  constructor(parent, { title, unit, lines, format, max, least = 0 }) {
    this.lines = lines;
    this.format = format;
    this.max = max;
    this.least = least;
    this.title = title;
    this.root = element('section', 'chart');
    const head = element('h3', '', title);
    head.append(element('span', '', unit));
    this.canvas = element('canvas');
    this.canvas.setAttribute('role', 'img');
    this.canvas.setAttribute('aria-label', title);  // until there are numbers
    this.canvas.tabIndex = 0;
    this.legend = element('div', 'legend');
    this.cells = lines.map((line, i) => {
      const cell = element('span', i === 1 ? 'second' : '');
      const value = element('b', '', '–');
      cell.append(element('i'), element('span', '', line.name), value);
      this.legend.append(cell);
      return value;
    });
    this.root.append(head, this.canvas, this.legend);
    parent.append(this.root);
    this.#listen();
  }

  #listen() {
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    document.addEventListener('themechange', () => this.draw());
    const move = (x) => {
      this.#pointer = x === null ? null : Math.min(1, Math.max(0, x));
      this.draw();
    };
    this.canvas.addEventListener('pointermove', (e) => {
      const box = this.canvas.getBoundingClientRect();
      move(1 - (e.clientX - box.left) / box.width);
    });
    this.canvas.addEventListener('pointerleave', () => move(null));
    this.canvas.addEventListener('blur', () => move(null));
    this.canvas.addEventListener('keydown', (e) => {
      if (e.key === 'ArrowLeft') move((this.#pointer ?? 0) + 0.02);
      else if (e.key === 'ArrowRight') move((this.#pointer ?? 0) - 0.02);
      else return;
      e.preventDefault();
    });
  }

  push(t, values) {
    this.#points.push({ t, values });
    while (this.#points.length > 2 && this.#points[1].t < t - WINDOW_MS) this.#points.shift();
    this.draw();
  }

  get latest() {
    return this.#points.at(-1)?.values ?? null;
  }

  #shown(now) {
    if (this.#pointer === null || this.#points.length === 0) return this.#points.at(-1) ?? null;
    const at = now - this.#pointer * WINDOW_MS;
    return this.#points.reduce((best, p) => (Math.abs(p.t - at) < Math.abs(best.t - at) ? p : best));
  }

  draw() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    if (width === 0) return;
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const c = this.canvas.getContext('2d');
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const now = this.#points.at(-1)?.t ?? 0;
    const highest = Math.max(this.least, ...this.#points.flatMap((p) => p.values.map((v) => v ?? 0)));
    const top = this.max ?? niceCeiling(highest);
    const plot = { left: 0, right: width - 48, top: 5, bottom: height - 6 };
    const x = (t) => plot.right - ((now - t) / WINDOW_MS) * (plot.right - plot.left);
    const y = (v) => plot.bottom - (Math.min(v, top) / top) * (plot.bottom - plot.top);
    this.#grid(c, style, plot, top, y, width);
    this.lines.forEach((line, i) => this.#line(c, style.getPropertyValue(line.color).trim(), i, x, y, plot));
    const shown = this.#shown(now);
    if (this.#pointer !== null && shown) this.#crosshair(c, style, shown, x, y, plot);
    this.#write(shown, now);
  }

  #grid(c, style, plot, top, y, width) {
    c.font = `10.5px ${style.getPropertyValue('--font')}`;
    c.textBaseline = 'middle';
    c.textAlign = 'right';
    c.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(y(top * part)) + 0.5;
      c.strokeStyle = style.getPropertyValue('--line');
      c.beginPath();
      c.moveTo(plot.left, at);
      c.lineTo(plot.right + 4, at);
      c.stroke();
      c.fillStyle = style.getPropertyValue('--faint');
      c.fillText(this.format(top * part), width - 1, Math.min(at, plot.bottom));
    }
  }

  #line(c, color, index, x, y, plot) {
    let run = [];
    const flush = () => {
      if (run.length === 1) {
        c.fillStyle = color;
        c.beginPath();
        c.arc(run[0][0], run[0][1], 2.2, 0, 7);
        c.fill();
      } else if (run.length > 1) {
        c.beginPath();
        run.forEach(([px, py], i) => (i === 0 ? c.moveTo(px, py) : c.lineTo(px, py)));
        c.strokeStyle = color;
        c.lineWidth = 1.7;
        c.lineJoin = 'round';
        c.stroke();
        if (index === 0) {
          c.lineTo(run.at(-1)[0], plot.bottom);
          c.lineTo(run[0][0], plot.bottom);
          c.globalAlpha = 0.11;
          c.fillStyle = color;
          c.fill();
          c.globalAlpha = 1;
        }
      }
      run = [];
    };
    c.save();
    c.beginPath();
    c.rect(plot.left, 0, plot.right - plot.left + 3, plot.bottom + 4);
    c.clip();
    for (const point of this.#points) {
      const v = point.values[index];
      if (v === null || !Number.isFinite(v)) flush();
      else run.push([x(point.t), y(v)]);
    }
    flush();
    c.restore();
  }

  #crosshair(c, style, point, x, y, plot) {
    const at = Math.max(plot.left, x(point.t));
    c.strokeStyle = style.getPropertyValue('--faint');
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(at, plot.top);
    c.lineTo(at, plot.bottom);
    c.stroke();
    this.lines.forEach((line, i) => {
      if (point.values[i] === null) return;
      c.fillStyle = style.getPropertyValue(line.color);
      c.beginPath();
      c.arc(at, y(point.values[i]), 3, 0, 7);
      c.fill();
    });
  }

  #write(shown, now) {
    const text = (v) => (v === null || v === undefined ? '–' : this.format(v));
    this.cells.forEach((cell, i) => (cell.textContent = text(shown?.values[i])));
    const ago = shown && this.#pointer !== null ? `${Math.round((now - shown.t) / 1000)} s ago` : 'now';
    const parts = this.lines.map((line, i) => `${line.name} ${text(shown?.values[i])}`);
    this.canvas.setAttribute('aria-label', `${this.title}, ${ago}: ${parts.join(', ')}`);
  }
}
