// Asks for one answer and writes it into its message as it comes.

import { spokenText, splitThought } from './conversation.js';
import { TokenTrack } from './tokens.js';

const TOP_LOGPROBS = 5;
const PLAIN_TOKENS = 256; // of a text that is continued; the API's own default is 16

// What the API gets of a message: a text, or parts where there are pictures.
function contentOf(node) {
  if (node.role !== 'user') return splitThought(node).answer;
  const spoken = spokenText(node);
  const pictures = node.files.filter((file) => file.picture);
  if (pictures.length === 0) return spoken;
  const parts = pictures.map(({ picture }) => ({ type: 'image_url', image_url: { url: picture } }));
  if (spoken !== '') parts.push({ type: 'text', text: spoken });
  return parts;
}

// `before`: the messages so far; `node`: the answer, with text if it is to be continued.
// `options`: {mode: 'chat' | 'plain', model, system, fields, logprobs}
export function requestFor(before, node, { mode, model, system, fields, logprobs }) {
  const request = {
    model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...fields,
  };
  if (mode === 'plain') {
    request.max_tokens ??= PLAIN_TOKENS;
    if (logprobs) request.logprobs = TOP_LOGPROBS;
    request.prompt = [...before, node].map((n) => (n.role === 'user' ? spokenText(n) : n.content)).join('');
    return request;
  }
  if (logprobs) {
    request.logprobs = true;
    request.top_logprobs = TOP_LOGPROBS;
  }
  request.messages = before.map((n) => ({ role: n.role, content: contentOf(n) })).filter((m) => m.content.length > 0);
  if (system !== '') request.messages.unshift({ role: 'system', content: system });
  if (node.content !== '') {
    const last = { role: 'assistant', content: node.content };
    if (node.thought !== '') last.reasoning_content = node.thought;
    request.messages.push(last);
    request.continue_final_message = true;
    request.add_generation_prompt = false;
  }
  return request;
}

// Times and counts of an answer.
class Numbers {
  #begin = performance.now();
  #first = 0;
  #last = 0;
  #usage = null;
  #drafts = null; // of speculative decoding

  constructor(before) {
    this.before = before; // tokens of the part that is continued
  }

  count({ usage, metrics }) {
    this.#usage = usage ?? this.#usage;
    this.#drafts = metrics?.speculative_decoding ?? this.#drafts;
  }

  tick() {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  get tokens() {
    return this.before + (this.#usage?.completion_tokens ?? 0);
  }

  text(finish) {
    const parts = [];
    const tokens = this.#usage?.completion_tokens ?? 0;
    if (this.tokens > 0) parts.push(this.tokens === 1 ? '1 token' : `${this.tokens} tokens`);
    const time = this.#last - this.#first;
    if (tokens > 1 && time > 0) parts.push(`${(((tokens - 1) * 1000) / time).toFixed(1)} tok/s`);
    if (this.#first) parts.push(`first after ${(this.#first - this.#begin).toFixed(0)} ms`);
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    if (cached && finish) parts.push(`${cached} of ${this.#usage.prompt_tokens} prompt tokens cached`);
    const drafted = this.#drafts?.num_draft_tokens;
    if (drafted) parts.push(`${this.#drafts.num_accepted_draft_tokens} of ${drafted} drafted tokens accepted`);
    if (finish === 'length') parts.push('cut at the limit of tokens');
    if (finish === 'stopped') parts.push('stopped');
    return parts.join(' · ');
  }
}

// Fills `node` until the answer ends or `signal` aborts; `changed` is called after each change. Throws what the
// server or the connection reports; `node` holds what came before.
export async function streamAnswer({ api, request, node, mode, logprobs, signal, changed }) {
  const numbers = new Numbers(node.tokens);
  if (!logprobs) node.track = null;
  else node.track ??= new TokenTrack(node.content.length);
  let finish = '';
  node.finish = 'interrupted';
  try {
    const path = mode === 'chat' ? '/v1/chat/completions' : '/v1/completions';
    for await (const event of api.stream(path, request, signal)) {
      numbers.count(event);
      const choice = event.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const text = (mode === 'chat' ? choice.delta?.content : choice.text) ?? '';
      const thought = choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? '';
      if (text !== '' || thought !== '') numbers.tick();
      node.content += text;
      node.thought += thought;
      const thinking = node.thought !== '' && node.content === '';
      if (choice.logprobs && node.track && !thinking) {
        if (mode === 'chat') node.track.addChat(choice.logprobs.content ?? []);
        else node.track.addCompletion(choice.logprobs);
      }
      node.stats = numbers.text('');
      changed();
    }
    node.finish = finish || 'stop';
  } catch (error) {
    if (!signal.aborted) throw error;
    node.finish = 'stopped';
  } finally {
    node.tokens = numbers.tokens;
    node.stats = numbers.text(node.finish);
  }
}
