// The page: connects the parts and the server. Chats use /v1/chat/completions; models without a chat
// template continue a text over /v1/completions.

import { Api } from './api.js';
import { Chat } from './chat.js';
import { splitThought } from './conversation.js';
import { Dashboard } from './dashboard.js';
import { $, copyText } from './dom.js';
import { Attachments } from './files.js';
import { History } from './history.js';
import { Panels } from './panels.js';
import { Settings } from './settings.js';
import { Shortcuts } from './shortcuts.js';
import { Store } from './store.js';
import { TokenCard } from './tokens.js';

const IDEAS = {
  chat: ['Explain how a KV cache works', 'Write a haiku about meltwater', 'Sort a list in Python, with comments'],
  plain: ['Once upon a time', 'The three laws of thermodynamics are', 'def fibonacci(n):'],
};

const api = new Api();
const store = new Store();
const settings = new Settings($('settings-form'), $('sampling'));
const card = new TokenCard($('popover'));
const dashboard = new Dashboard(api, $('charts'), (text, up) => {
  $('live-state').textContent = text;
  setStatus(up, up ? 'connected' : 'not connected');
});
const panels = new Panels((name, on) => {
  if (name === 'live') dashboard.open = on;
});
const attachments = new Attachments(enableSend);
const history_ = new History(store, (id) => open(id));
const chat = new Chat({
  api, store, settings, card, explain, busy,
  model: () => $('model').value,
  noTemplate: () => setMode('plain'),
  changed: () => history_.refresh(),
  shown: (id, title) => {
    history_.current = id;
    document.title = title ? `${title} · Freshet` : `${$('model').value || 'Freshet'} · Freshet`;
    const wanted = id ? `#${id}` : '';
    if (location.hash !== wanted) history.pushState(null, '', wanted || location.pathname);
  },
});
history_.onRename = (id, title) => chat.renamed(id, title);

function open(id) {
  if (!panels.wide) panels.open('history', false);
  $('prompt').focus();
  return chat.show(id);
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

function busy(on) {
  $('stop').hidden = !on;
  $('send').hidden = on;
  $('log').classList.toggle('busy', on);
  enableSend();
}

function enableSend() {
  $('send').disabled = $('prompt').value.trim() === '' && attachments.empty;
}

function grow() {
  const field = $('prompt');
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}

function send() {
  if (chat.running || $('send').disabled) return;
  const text = chat.mode === 'chat' ? $('prompt').value.trim() : $('prompt').value;
  $('prompt').value = '';
  grow();
  chat.send(text, attachments.take());
}

function stop() {
  chat.stop();
  $('prompt').focus();
}

function setMode(mode) {
  chat.mode = mode;
  const plain = mode === 'plain';
  $('lead').textContent = plain ? 'Begin a text.' : 'Ask something.';
  $('mode-hint').textContent = plain ? 'This model has no chat template: it continues what you write, as it is.' : '';
  $('prompt').placeholder = plain ? 'Text to continue' : 'Message';
  $('system-field').hidden = plain;
  chat.showIdeas(IDEAS[mode], (idea) => {
    $('prompt').value = idea;
    enableSend();
    send();
  });
}

function takePictures(on) {
  attachments.takesPictures = on;
  const label = on ? 'Add pictures or text files' : 'Add text files';
  $('attach').setAttribute('aria-label', label);
  $('attach').title = label;
  document.querySelector('.drop-note').textContent = on ? 'Drop pictures or text files here' : 'Drop text files here';
}

function wantKey() {
  $('key-field').classList.add('wanted');
  $('key-field').hidden = false;
  panels.open('settings');
  $('key').focus();
}

function setStatus(up, text) {
  $('dot').className = up ? 'dot up' : 'dot down';
  if ($('status').textContent !== text) $('status').textContent = text;
}

function showModels(models) {
  const before = $('model').value || read('localStorage', 'freshet.model');
  $('model').replaceChildren(...models.map((m) => new Option(m.id, m.id)));
  if (models.some((m) => m.id === before)) $('model').value = before;
  $('model').hidden = models.length < 2;
  $('model-name').hidden = models.length > 1;
  $('model-name').textContent = models[0]?.id ?? 'no model';
  if (!chat.id) document.title = `${$('model').value || 'Freshet'} · Freshet`;
}

// What is served, and whether it can chat. Connected is who knows both: a message that is sent before that
// goes without the server's defaults.
async function connect() {
  try {
    showModels((await api.json('/v1/models')).data);
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
    settings.setDefaults(props.chat_sampling ?? {});
    takePictures(props.modalities?.vision === true);
  } catch {
    setMode('chat'); // the first answer will tell
  }
  setStatus(true, 'connected');
  return undefined;
}

// Storage may be blocked: then what is kept there lasts as long as the page.
function read(area, name) {
  try {
    return window[area].getItem(name) ?? '';
  } catch {
    return '';
  }
}

function keep(area, name, value) {
  try {
    window[area].setItem(name, value);
  } catch {
    // See read().
  }
}

function nameTheme() {
  const label = `Colours: ${window.freshetTheme.choice}`;
  $('theme').setAttribute('aria-label', label);
  $('theme').title = label;
  $('theme').querySelector('use').setAttribute('href', `#i-theme-${window.freshetTheme.choice}`);
}

function listenToComposer() {
  $('composer').addEventListener('submit', (e) => {
    e.preventDefault();
    send();
  });
  $('prompt').addEventListener('input', () => {
    grow();
    enableSend();
  });
  $('prompt').addEventListener('keydown', (e) => {
    if (e.key === 'ArrowUp' && $('prompt').value === '' && !chat.running && chat.lastUser) {
      e.preventDefault();
      chat.lastUser.edit();
    }
    if (e.key !== 'Enter' || e.shiftKey || e.ctrlKey || e.metaKey || e.isComposing) return;
    e.preventDefault();
    send();
  });
  $('stop').addEventListener('click', stop);
}

function listen() {
  listenToComposer();
  addEventListener('keydown', (e) => {
    if (e.key !== 'Escape' || e.defaultPrevented || $('help').open || $('menu').matches(':popover-open')) return;
    if (chat.running) stop();
    else if (!panels.closeOne()) card.hide();
  });
  $('new-chat').addEventListener('click', () => open(null));
  $('theme').addEventListener('click', () => window.freshetTheme.next());
  document.addEventListener('themechange', nameTheme);
  $('scroll').addEventListener('scroll', () => ($('latest').hidden = chat.atEnd()));
  $('latest').addEventListener('click', chat.toEnd);
  $('model').addEventListener('change', () => {
    keep('localStorage', 'freshet.model', $('model').value);
    setMode('chat'); // the first answer will tell
  });
  settings.onChange(() => $('log').classList.toggle('heat', settings.heat.checked));
  $('key').addEventListener('change', () => {
    api.key = $('key').value.trim();
    keep('sessionStorage', 'freshet.key', api.key);
    connect();
  });
  addEventListener('popstate', () => {
    if (location.hash.slice(1) !== chat.id) chat.show(location.hash.slice(1) || null);
  });
}

const shortcuts = new Shortcuts({
  focus: () => $('prompt').focus(),
  newChat: () => open(null),
  search: () => {
    panels.open('history');
    $('search').select();
  },
  history: () => panels.toggle('history'),
  settings: () => panels.toggle('settings'),
  theme: () => window.freshetTheme.next(),
  retry: () => chat.retryLast(),
  copy: () => {
    if (chat.lastAnswer) copyText(splitThought(chat.lastAnswer).answer);
  },
});

async function begin() {
  api.key = read('sessionStorage', 'freshet.key');
  $('key').value = api.key;
  $('key-field').hidden = api.key === '';
  $('log').classList.toggle('heat', settings.heat.checked);
  $('open-help').addEventListener('click', () => shortcuts.show());
  listen();
  nameTheme();
  setMode('chat');
  panels.arrange();
  enableSend();
  connect();
  if (panels.wide) $('prompt').focus();
  await store.open(() => history_.refresh());
  await history_.refresh();
  if (location.hash.length > 1) await chat.show(location.hash.slice(1));
}

begin();
