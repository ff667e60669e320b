// Reads Prometheus's text format, and turns counters and histograms into what a chart shows.

const LINE = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g;

// -> Map from a sample's name to [{labels, value}].
export function parse(text) {
  const samples = new Map();
  for (const line of text.split('\n')) {
    if (line === '' || line.startsWith('#')) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? '').matchAll(LABEL)) labels[name] = value;
    const value = match[3] === '+Inf' ? Infinity : Number(match[3]);
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value });
  }
  return samples;
}

// The sum over all label sets; null when there is no such sample.
export function total(samples, name) {
  const found = samples.get(name);
  return found ? found.reduce((sum, s) => sum + s.value, 0) : null;
}

// {sum, count, buckets: [[upper bound, cumulative count]]}, summed over labels; null when absent.
export function histogram(samples, name) {
  const found = samples.get(`${name}_bucket`);
  if (!found) return null;
  const buckets = new Map();
  for (const s of found) {
    const bound = s.labels.le === '+Inf' ? Infinity : Number(s.labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + s.value);
  }
  return {
    sum: total(samples, `${name}_sum`) ?? 0,
    count: total(samples, `${name}_count`) ?? 0,
    buckets: [...buckets].sort((a, b) => a[0] - b[0]),
  };
}

// What happened between two readings of a histogram: mean, and a quantile by linear interpolation
// inside its bucket. null where nothing happened. The first and last bucket bound a quantile on one
// side only, so it is null there.
export function between(before, after, q) {
  const count = after.count - before.count;
  if (count <= 0) return { mean: null, quantile: null };
  const mean = (after.sum - before.sum) / count;
  const wanted = q * count;
  let low = 0;
  let seen = 0;
  for (let i = 0; i < after.buckets.length; i++) {
    const [bound, cumulative] = after.buckets[i];
    const here = cumulative - (before.buckets[i]?.[1] ?? 0);
    if (here >= wanted) {
      if (i === 0 || !Number.isFinite(bound)) return { mean, quantile: null };
      return { mean, quantile: low + (bound - low) * ((wanted - seen) / (here - seen)) };
    }
    low = bound;
    seen = here;
  }
  return { mean, quantile: null };
}
