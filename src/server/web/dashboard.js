// The live view: reads /metrics once a second while somebody looks, and draws it.

import { between, histogram, parse, total } from './prometheus.js';
import { LineChart } from './chart.js';

const PERIOD_MS = 1000;
const RATE_WINDOW_MS = 3000; // rates are over so much
const LATENCY_WINDOW_MS = 10_000;
const TTFT = 'vllm:time_to_first_token_seconds';
const ITL = 'vllm:inter_token_latency_seconds';

const number = (v) => (v >= 10_000 ? `${+(v / 1000).toFixed(1)}k` : v >= 100 ? v.toFixed(0) : `${+v.toPrecision(3)}`);
const time = (s) => (s >= 1 ? `${+s.toPrecision(3)} s` : s >= 0.1 ? `${(s * 1000).toFixed(0)} ms` : `${+(s * 1000).toPrecision(2)} ms`);
const share = (v) => `${+(v * 100).toFixed(v < 0.1 ? 1 : 0)}%`;

export class Dashboard {
  #api;
  #history = []; // {t, ...reading}, oldest first
  #timer = 0;
  #running = false;

  constructor(api, parent, state) {
    this.#api = api;
    this.state = state;
    const two = (a, b) => [{ name: a, color: '--c1' }, { name: b, color: '--c2' }];
    const chart = (title, unit, lines, format, scale) =>
      new LineChart(parent, { title, unit, lines, format, ...scale });
    this.throughput = chart('Throughput', 'tokens per second', two('generated', 'prompt'), number);
    this.ttft = chart('Time to first token', 'last 10 s', two('mean', '90th percentile'), time);
    this.itl = chart('Inter-token latency', 'last 10 s', two('mean', '90th percentile'), time);
    this.queue = chart('Requests', 'now', two('running', 'waiting'), number, { least: 2 });
    this.cache = chart('KV cache', 'share', two('in use', 'prefix hits'), share, { max: 1 });
    document.addEventListener('visibilitychange', () => this.#schedule(0));
  }

  // Draws only while it is open: a closed panel costs the server nothing.
  set open(open) {
    this.#running = open;
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (this.#running && !document.hidden) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    const begin = performance.now();
    try {
      const text = await this.#api.text('/metrics', AbortSignal.timeout(5000));
      this.#add(performance.now(), parse(text));
      this.state('updated every second', true);
    } catch (error) {
      this.state(error.status ? error.message : 'the server does not answer', false);
    }
    this.#schedule(Math.max(100, PERIOD_MS - (performance.now() - begin)));
  }

  // The newest reading that is at least `age` old, or the oldest there is.
  #before(t, age) {
    return this.#history.findLast((r) => r.t <= t - age) ?? this.#history[0];
  }

  #add(t, samples) {
    const now = {
      t,
      generated: total(samples, 'vllm:generation_tokens_total'),
      prompt: total(samples, 'vllm:prompt_tokens_total'),
      queries: total(samples, 'vllm:prefix_cache_queries_total'),
      hits: total(samples, 'vllm:prefix_cache_hits_total'),
      ttft: histogram(samples, TTFT),
      itl: histogram(samples, ITL),
    };
    // A server that was restarted counts from nought again.
    if ((this.#history.at(-1)?.generated ?? 0) > (now.generated ?? 0)) this.#history = [];
    this.#history.push(now);
    while (this.#history[0].t < t - 2 * LATENCY_WINDOW_MS) this.#history.shift();
    const rate = (name) => {
      const before = this.#before(t, RATE_WINDOW_MS);
      if (before === now || now[name] === null || before[name] === null) return null;
      return Math.max(0, (now[name] - before[name]) / ((t - before.t) / 1000));
    };
    const latency = (name) => {
      const before = this.#before(t, LATENCY_WINDOW_MS);
      if (!now[name] || !before[name]) return [null, null];
      const { mean, quantile } = between(before[name], now[name], 0.9);
      return [mean, quantile];
    };
    const recent = this.#before(t, LATENCY_WINDOW_MS);
    const asked = (now.queries ?? 0) - (recent.queries ?? 0);
    this.throughput.push(t, [rate('generated'), rate('prompt')]);
    this.ttft.push(t, latency('ttft'));
    this.itl.push(t, latency('itl'));
    this.queue.push(t, [total(samples, 'vllm:num_requests_running'), total(samples, 'vllm:num_requests_waiting')]);
    this.cache.push(t, [
      total(samples, 'vllm:kv_cache_usage_perc'),
      asked > 0 ? Math.min(1, (now.hits - recent.hits) / asked) : null,
    ]);
  }
}
