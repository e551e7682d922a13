'use strict';
// Invariant: whatever comes from the API is written with textContent, or as a number into a <progress>. Never as markup.

const FAST_MS = 2000;          // sandboxes and pools
const SLOW_EVERY = 5;          // images, metrics and health: every fifth round
const TIMEOUT_MS = 10000;
const MOST_ROWS = 200;         // a node may have thousands of sandboxes
const TOKEN = 'thaw-token';

const $ = id => document.getElementById(id);
const make = (tag, text, kind) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const list = value => Array.isArray(value) ? value : [];

// Units, as `thaw top` has them.
const size = bytes => {
  if (!Number.isFinite(bytes)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  while (bytes >= 1024 && at < 4) { bytes /= 1024; at++; }
  return `${bytes.toFixed(at && bytes < 10 ? 1 : 0)} ${units[at]}`;
};
const time = seconds => !Number.isFinite(seconds) ? '–' : seconds < 0.01 ? `${(seconds * 1000).toFixed(1)} ms`
  : seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
const age = seconds => {
  for (const [unit, length] of [['d', 86400], ['h', 3600], ['m', 60]])
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  return `${Math.max(0, Math.floor(seconds))} s`;
};

class Problem extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

// One answer of the API. null: this caller's role does not suffice.
async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: 'no-store', credentials: 'same-origin', signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 403) return null;
  if (!answer.ok) throw new Problem(answer.status, (await answer.json().catch(() => ({}))).detail || `HTTP ${answer.status}`);
  return path === '/metrics' ? answer.text() : answer.json();
}

// Prometheus's text format: [{name, labels, value}].
function samples(text) {
  const all = [];
  for (const line of text.split('\n')) {
    const match = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || '').matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    all.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return all;
}
const total = (all, name, matches = () => true) =>
  all.filter(s => s.name === name && matches(s.labels)).reduce((sum, s) => sum + s.value, 0);

function bars(place, rows) {
  place.replaceChildren(...rows.map(([name, part, label]) => {
    const row = make('div'), bar = make('progress');
    bar.max = 1;
    bar.value = Number.isFinite(part) ? Math.min(1, Math.max(0, part)) : 0;
    bar.setAttribute('aria-label', name);
    row.append(make('span', name), bar, make('span', label, 'n'));
    return row;
  }));
}

function summary(cards) {
  $('summary').replaceChildren(...cards.map(([name, value, more]) => {
    const card = make('div'), number = make('dd', value);
    if (more) number.append(make('small', more));
    card.append(make('dt', name), number);
    return card;
  }));
}

function say(kind, text) {
  $('state').className = kind;
  $('state').lastElementChild.textContent = text;
}

// What the last answers said. `cpu` has the CPU time of each sandbox in the round before.
const known = { sandboxes: [], usage: null, images: null, metrics: null, health: null, cpu: new Map() };

// The part of a CPU that a sandbox used since the round before.
function cpuOf(usage, id, before) {
  const last = before.get(id);
  if (!usage || usage.cpu_ns == null || !last || usage.at_ns <= last.at_ns) return undefined;
  return (usage.cpu_ns - last.cpu_ns) / (usage.at_ns - last.at_ns);
}

const TONE = { running: 'good', paused: 'warn', failed: 'bad' };

function sandboxRow(sandbox) {
  const row = make('tr');
  const name = make('td', sandbox.name || sandbox.id);
  name.title = sandbox.id;
  if (sandbox.tenant) name.append(make('small', sandbox.tenant));
  const image = make('td', sandbox.image);
  image.title = sandbox.image;
  const state = make('td', undefined, TONE[sandbox.state] || '');
  state.append(make('i', undefined, 'dot'), sandbox.state);
  if (sandbox.failure) state.append(make('small', sandbox.failure.reason, 'why'));
  else if (sandbox.exit_code != null) state.append(make('small', `code ${sandbox.exit_code}`));
  const cpu = sandbox.cpu === undefined ? '–' : `${(sandbox.cpu * 100).toFixed(0)} %`;
  const memory = make('td', size(sandbox.memory), 'n');
  memory.title = `of ${sandbox.memory_mib} MiB`;
  row.append(name, image, state, make('td', cpu, 'n'), memory, make('td', age(Date.now() / 1000 - sandbox.created), 'n'));
  return row;
}

function showSandboxes() {
  const usage = new Map(list(known.usage?.sandboxes).map(s => [s.id, s.usage]));
  const before = known.cpu;
  known.cpu = new Map([...usage].filter(([, u]) => u.cpu_ns != null));
  const all = known.sandboxes.map(s => {
    const used = usage.get(s.id);
    return { ...s, cpu: cpuOf(used, s.id, before), memory: used?.memory_bytes ?? undefined };
  });
  // Failed ones first, then the busiest.
  const order = s => (s.state === 'failed' ? 1e6 : 0) + (s.cpu || 0);
  all.sort((a, b) => order(b) - order(a) || b.created - a.created || (a.id < b.id ? -1 : 1));
  $('sandboxes').tBodies[0].replaceChildren(...all.slice(0, MOST_ROWS).map(sandboxRow));
  $('sandboxes').hidden = !all.length;
  $('no-sandboxes').hidden = !!all.length;
  const rest = all.length - MOST_ROWS;
  $('more-sandboxes').textContent = known.more ? `More than ${known.sandboxes.length} sandboxes; thaw top shows all`
    : rest > 0 ? `${rest} more; thaw top shows all` : '';
}

function showPools() {
  const pools = list(known.usage?.pools);
  $('pools-about').textContent = pools.length ? '' : 'Only administrators see the pools.';
  const hits = p => p.claims ? `, ${Math.round(100 * p.hits / p.claims)} % hit` : '';
  bars($('pools'), pools.map(p => p.high ? [p.pool, p.ready / p.high, `${p.ready} of ${p.high}${hits(p)}`] : [p.pool, 0, 'off']));
}

function showStarts() {
  const all = known.metrics;
  if (!all) {
    $('starts-about').textContent = 'Only administrators see the metrics.';
    return bars($('stages'), []);
  }
  const starts = total(all, 'thaw_start_seconds_count');
  const mean = total(all, 'thaw_start_seconds_sum') / starts;
  $('starts-about').textContent = starts
    ? `Mean of ${starts} starts since thawd started: ${time(mean)}. Some stages run beside each other.` : 'No starts yet.';
  const stages = new Map();
  for (const s of all) {
    const part = { thaw_start_stage_seconds_sum: s.value }[s.name];
    if (part !== undefined) stages.set(s.labels.stage, (stages.get(s.labels.stage) || 0) + part);
  }
  const rows = [...stages].filter(([, sum]) => sum > 0).sort((a, b) => b[1] - a[1]).slice(0, 8);
  bars($('stages'), starts ? rows.map(([name, sum]) => [name, sum / starts / mean, time(sum / starts)]) : []);
  const reasons = new Map();
  for (const s of all)
    if (s.name === 'thaw_start_slow_total' && s.value) reasons.set(s.labels.reason, (reasons.get(s.labels.reason) || 0) + s.value);
  $('slow').replaceChildren(...[...reasons].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([reason, count]) => {
    const item = make('span', `${reason} `);
    item.append(make('b', `${count}×`));
    return item;
  }));
}

function imageRow(image) {
  const row = make('tr'), name = make('td', image.reference);
  name.title = image.digest;
  const present = image.total_bytes ? `${Math.round(100 * image.present_bytes / image.total_bytes)} %` : '–';
  row.append(name, make('td', size(image.bytes), 'n'), make('td', present, 'n'), make('td', image.in_use ? 'in use' : ''));
  return row;
}

function showImages() {
  const images = list(known.images?.items ?? known.images?.images);
  $('images-about').textContent = !known.images ? 'Only administrators see the images.' : images.length ? '' : 'No images in the store.';
  $('images').hidden = !images.length;
  $('images').tBodies[0].replaceChildren(...images.slice(0, MOST_ROWS).map(imageRow));
  $('more-images').textContent = images.length > MOST_ROWS ? `${images.length - MOST_ROWS} more; thaw image ls shows all` : '';
}

function showSummary() {
  const count = state => known.sandboxes.filter(s => s.state === state).length;
  const memory = list(known.usage?.sandboxes).reduce((sum, s) => sum + (s.usage?.memory_bytes || 0), 0);
  const failed = count('failed'), paused = count('paused');
  const cards = [
    ['Running', String(count('running')), paused ? `${paused} paused` : 'none paused'],
    ['Failed', String(failed), failed ? 'see below' : 'none listed'],
    ['Memory', size(memory), 'of all sandboxes'],
  ];
  const all = known.metrics;
  if (all) {
    const starts = total(all, 'thaw_start_seconds_count'), failures = total(all, 'thaw_start_failures_total');
    const limit = total(all, 'thaw_disk_budget_bytes'), used = total(all, 'thaw_disk_budget_used_bytes');
    cards.push(['Mean start', starts ? time(total(all, 'thaw_start_seconds_sum') / starts) : '–', `${starts} starts, ${failures} failed`]);
    cards.push(['Image store', size(total(all, 'thaw_store_bytes')),
      limit ? `disk budget ${Math.round(100 * used / limit)} % used` : 'no disk budget']);
  }
  summary(cards);
}

let round = 0, timer = 0;

async function refresh() {
  const slow = round++ % SLOW_EVERY === 0;
  const asked = [ask('/v1/sandboxes?limit=1000'), ask('/v1/node/usage')];
  if (slow) asked.push(ask('/v1/images'), ask('/metrics'), ask('/v1/health'));
  const [sandboxes, usage, images, metrics, health] = await Promise.all(asked);
  known.sandboxes = list(sandboxes?.items);
  known.more = !!sandboxes?.continue;
  known.usage = usage;
  if (slow) Object.assign(known, { images, metrics: metrics && samples(metrics), health });
  $('login').hidden = true;
  $('data').hidden = false;
  $('forget').hidden = !sessionStorage.getItem(TOKEN);
  showSandboxes();
  showPools();
  showSummary();
  if (slow) { showStarts(); showImages(); }
  $('version').textContent = known.health?.version || '';
  if (known.health?.draining) say('warn', 'Draining: no new sandboxes');
  else say('good', 'Serving');
  $('updated').textContent = `Updated ${new Date().toLocaleTimeString()}`;
}

function login(why) {
  sessionStorage.removeItem(TOKEN);
  $('data').hidden = true;
  $('forget').hidden = true;
  $('login').hidden = false;
  $('refused').textContent = why;
  $('updated').textContent = '';
  say('', 'Not connected');
}

async function loop() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    await refresh();
  } catch (error) {
    round = 0;
    if (error.status === 401) return login(sessionStorage.getItem(TOKEN) ? `thawd refused this token: ${error.message}` : '');
    say('bad', error.status ? error.message : 'thawd does not answer');
  }
  clearTimeout(timer);
  timer = setTimeout(loop, FAST_MS);
}

$('login').querySelector('form').addEventListener('submit', event => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $('token').value.trim());
  $('token').value = '';
  round = 0;
  loop();
});
$('forget').addEventListener('click', () => { clearTimeout(timer); login(''); });
document.addEventListener('visibilitychange', () => { if (!document.hidden && $('login').hidden) loop(); });
loop();
