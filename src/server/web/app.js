// The page: a conversation over /v1/chat/completions, or plain continuation over /v1/completions for
// models without a chat template. Conversations live in this tab's memory only.

import { Api } from './api.js';
import { Dashboard } from './dashboard.js';
import { MessageView } from './message.js';
import { Settings } from './settings.js';
import { TokenCard, TokenTrack } from './tokens.js';

const $ = (id) => document.getElementById(id);
const TOP_LOGPROBS = 5;
const IDEAS = {
  chat: ['Explain how a KV cache works', 'Write a haiku about meltwater', 'Sort a list in Python, with comments'],
  plain: ['Once upon a time', 'The three laws of thermodynamics are', 'def fibonacci(n):'],
};

const api = new Api();
const settings = new Settings($('settings-form'), $('sampling'));
const card = new TokenCard($('popover'));
const wide = matchMedia('(min-width: 1121px)');

let mode = 'chat'; // or 'plain'
let maxModelLen = 0;
let messages = []; // {role, content, track, streaming, error, stats, view}
let running = null; // AbortController of the answer being written

// --- the conversation

const actions = {
  copy: (message) => navigator.clipboard?.writeText(message.content),
  retry: (message) => {
    const at = messages.indexOf(message);
    if (running || at < 0) return;
    truncate(at);
    answer();
  },
  edit: (message, text) => {
    const at = messages.indexOf(message);
    if (running || at < 0) return;
    message.content = text;
    if (message.role === 'user') {
      truncate(at + 1);
      message.view.update();
      answer();
    } else {
      message.track = null; // the tokens are not those of the text any more
      message.stats = 'edited';
      message.view.update();
    }
  },
};

function truncate(length) {
  for (const gone of messages.splice(length)) gone.view.root.remove();
}

function add(role, content) {
  const message = { role, content, thought: '', track: null, streaming: false, error: null, stats: null };
  message.view = new MessageView(message, actions, card);
  messages.push(message);
  $('log').append(message.view.root);
  $('welcome').hidden = true;
  return message;
}

function body() {
  const fields = settings.sampling();
  if (maxModelLen > 0 && fields.max_tokens > maxModelLen / 2) fields.max_tokens = Math.floor(maxModelLen / 2);
  const request = { model: $('model').value, stream: true, stream_options: { include_usage: true }, ...fields };
  const spoken = messages.filter((m) => m.content !== '');
  if (mode === 'plain') {
    if (settings.logprobs.checked) request.logprobs = TOP_LOGPROBS;
    request.prompt = spoken.map((m) => m.content).join('');
    return request;
  }
  if (settings.logprobs.checked) {
    request.logprobs = true;
    request.top_logprobs = TOP_LOGPROBS;
  }
  const system = settings.system.value.trim();
  request.messages = spoken.map(({ role, content }) => ({ role, content }));
  if (system !== '') request.messages.unshift({ role: 'system', content: system });
  return request;
}

// Reads out whole sentences as they are written; word by word nobody could follow.
class Announcer {
  #said = 0;
  say(content, last) {
    const fresh = content.slice(this.#said);
    const end = last ? fresh.length : fresh.search(/[.!?:]\s[^]*$|\n/) + 1;
    if (end <= 0) return;
    $('announce').textContent = fresh.slice(0, end);
    this.#said += end;
  }
}

function describe(begin, first, last, usage, finish) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(`${tokens} tokens`);
  if (tokens > 1 && last > first) parts.push(`${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tok/s`);
  if (first) parts.push(`first after ${(first - begin).toFixed(0)} ms`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (finish === 'length') parts.push('cut at max tokens');
  if (finish === 'stopped') parts.push('stopped');
  return parts.join(' · ');
}

async function answer() {
  const request = body();
  const message = add('assistant', '');
  message.streaming = true;
  message.track = settings.logprobs.checked ? new TokenTrack() : null;
  const controller = new AbortController();
  running = controller;
  busy(true);
  const announcer = new Announcer();
  const begin = performance.now();
  let first = 0;
  let last = 0;
  let usage = null;
  let finish = null;
  let frame = 0;
  const paint = () => {
    frame = 0;
    const stuck = atEnd();
    message.view.update();
    if (stuck) toEnd();
  };
  paint();
  toEnd();
  try {
    const path = mode === 'chat' ? '/v1/chat/completions' : '/v1/completions';
    for await (const event of api.stream(path, request, controller.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const text = (mode === 'chat' ? choice.delta?.content : choice.text) ?? '';
      const thought = choice.delta?.reasoning ?? '';
      if (text !== '' || thought !== '') {
        last = performance.now();
        first ||= last;
      }
      message.content += text;
      message.thought += thought;
      const thinking = message.thought !== '' && message.content === '';
      if (choice.logprobs && message.track && !thinking) {
        if (mode === 'chat') message.track.addChat(choice.logprobs.content ?? []);
        else message.track.addCompletion(choice.logprobs);
      }
      announcer.say(message.content, false);
      frame ||= requestAnimationFrame(paint);
    }
  } catch (error) {
    if (controller.signal.aborted) finish = 'stopped';
    else if (error.status === 400 && mode === 'chat' && /no chat template/.test(error.message)) finish = 'no template';
    else message.error = explain(error);
  }
  cancelAnimationFrame(frame);
  if (running === controller) {
    running = null;
    busy(false);
  }
  if (finish === 'no template') {
    truncate(messages.length - 1);
    setMode('plain');
    return answer();
  }
  message.streaming = false;
  message.stats = describe(begin, first, last, usage, finish);
  announcer.say(message.content, true);
  paint();
}

function explain(error) {
  if (error.status === 401) {
    wantKey();
    return 'The server asks for an API key: put it into the settings, then retry.';
  }
  if (error.status === 429) return `The server is busy${error.retryAfter ? `; try again in ${error.retryAfter} s` : ''}.`;
  if (error.status) return error.message;
  return 'The connection to the server was lost. Retry when it is back.';
}

// --- the frame around it

function busy(on) {
  $('stop').hidden = !on;
  $('send').hidden = on;
  $('log').classList.toggle('busy', on);
  enableSend();
}

function enableSend() {
  $('send').disabled = $('prompt').value.trim() === '';
}

function grow() {
  const field = $('prompt');
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}

function send() {
  const text = mode === 'chat' ? $('prompt').value.trim() : $('prompt').value;
  if (running || text.trim() === '') return;
  $('prompt').value = '';
  grow();
  add('user', text);
  answer();
}

const atEnd = () => $('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight < 60;
const toEnd = () => ($('scroll').scrollTop = $('scroll').scrollHeight);

function stop() {
  running?.abort();
  $('prompt').focus();
}

function setMode(next) {
  mode = next;
  const plain = mode === 'plain';
  $('lead').textContent = plain ? 'Begin a text.' : 'Ask something.';
  $('mode-hint').textContent = plain ? 'This model has no chat template: it continues what you write, as it is.' : '';
  $('prompt').placeholder = plain ? 'Text to continue' : 'Message';
  $('system-field').hidden = plain;
  $('ideas').replaceChildren(
    ...IDEAS[mode].map((idea) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = idea;
      button.addEventListener('click', () => {
        $('prompt').value = idea;
        send();
      });
      return button;
    }),
  );
}

function wantKey() {
  $('key-field').classList.add('wanted');
  $('key-field').hidden = false;
  open('settings', true);
  $('key').focus();
}

function setStatus(up, text) {
  $('dot').className = up ? 'dot up' : 'dot down';
  if ($('status').textContent !== text) $('status').textContent = text;
}

// What is served, and whether it can chat.
async function connect() {
  try {
    const models = (await api.json('/v1/models')).data;
    $('model').replaceChildren(...models.map((m) => new Option(m.id, m.id)));
    $('model').disabled = models.length < 2;
    maxModelLen = models[0]?.max_model_len ?? 0;
    document.title = `${models[0]?.id ?? 'Freshet'} · Freshet`;
    setStatus(true, 'connected');
    $('key-field').classList.remove('wanted');
  } catch (error) {
    setStatus(false, 'not connected');
    if (error.status === 401) return wantKey();
    setTimeout(connect, 3000);
    return undefined;
  }
  try {
    const props = await api.json('/props');
    setMode(props.chat_template ? 'chat' : 'plain');
  } catch {
    setMode('chat'); // the first answer will tell
  }
  return undefined;
}

const panels = {
  settings: { button: $('toggle-settings'), root: $('settings') },
  live: { button: $('toggle-live'), root: $('live') },
};
const dashboard = new Dashboard(api, $('charts'), (text, up) => {
  $('live-state').textContent = text;
  setStatus(up, up ? 'connected' : 'not connected');
});

function open(name, on) {
  panels[name].root.hidden = !on;
  panels[name].button.setAttribute('aria-expanded', String(on));
  if (name === 'live') dashboard.open = on;
  // Where panels lie over the chat there is room for one.
  if (on && !wide.matches) open(name === 'live' ? 'settings' : 'live', false);
}

function listen() {
  $('composer').addEventListener('submit', (e) => {
    e.preventDefault();
    send();
  });
  $('prompt').addEventListener('input', () => {
    grow();
    enableSend();
  });
  $('prompt').addEventListener('keydown', (e) => {
    if (e.key !== 'Enter' || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    send();
  });
  $('stop').addEventListener('click', stop);
  addEventListener('keydown', (e) => {
    if (e.key !== 'Escape') return;
    const shown = Object.keys(panels).find((name) => !wide.matches && !panels[name].root.hidden);
    if (running) stop();
    else if (shown) closePanel(shown);
    else card.hide();
  });
  $('new-chat').addEventListener('click', () => {
    running?.abort();
    truncate(0);
    $('welcome').hidden = false;
    $('prompt').focus();
  });
  for (const name of Object.keys(panels)) {
    panels[name].button.addEventListener('click', () => open(name, panels[name].root.hidden));
  }
  for (const button of document.querySelectorAll('[data-closes]')) {
    button.addEventListener('click', () => closePanel(button.dataset.closes));
  }
  $('scroll').addEventListener('scroll', () => ($('latest').hidden = atEnd()));
  $('latest').addEventListener('click', toEnd);
  settings.onChange(() => $('log').classList.toggle('heat', settings.heat.checked));
  $('key').addEventListener('change', () => {
    api.key = $('key').value.trim();
    try {
      sessionStorage.setItem('freshet.key', api.key);
    } catch {
      // Then it lasts as long as the page.
    }
    connect();
  });
  wide.addEventListener('change', arrange);
}

function closePanel(name) {
  open(name, false);
  panels[name].button.focus();
}

function arrange() {
  for (const name of Object.keys(panels)) open(name, wide.matches);
}

function begin() {
  try {
    api.key = sessionStorage.getItem('freshet.key') ?? '';
  } catch {
    api.key = '';
  }
  $('key').value = api.key;
  $('key-field').hidden = api.key === '';
  $('log').classList.toggle('heat', settings.heat.checked);
  listen();
  setMode('chat');
  arrange();
  enableSend();
  connect();
  if (wide.matches) $('prompt').focus();
}

begin();
