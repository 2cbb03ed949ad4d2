'use strict';

const $ = (id) => document.getElementById(id);
const text = (tag, s, cls) => {
  const e = document.createElement(tag);
  e.textContent = s;
  if (cls) e.className = cls;
  return e;
};

const size = (n) => {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i === 0 ? n.toFixed(0) : n.toFixed(1)) + ' ' + units[i];
};
const count = (n) => n >= 1e6 ? (n / 1e6).toFixed(2) + ' M' : n >= 1e3 ? (n / 1e3).toFixed(1) + ' k' : n.toFixed(0);
const tone = (state) => ({ up: 'good', open: 'good', in_sync: 'good', done: 'good', lost: 'bad', unavailable: 'bad', failed: 'bad', out: 'bad' }[state] || 'warn');
const plain = (state) => state.replaceAll('_', ' ');

let chosen = null; // {region, node}

// at is a path below the page's own, without the credentials that the page's address may have: no
// URL with credentials can be fetched.
const at = (path) => new URL(path, location.origin + location.pathname);

function rows(table, list, fill) {
  const body = document.createElement('tbody');
  for (const x of list) {
    const tr = document.createElement('tr');
    fill(tr, x);
    body.append(tr);
  }
  if (list.length === 0) {
    const tr = document.createElement('tr');
    const td = text('td', 'none', 'dim');
    td.colSpan = 9;
    tr.append(td);
    body.append(tr);
  }
  $(table).tBodies[0].replaceWith(body);
}

function spark(rates) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 120 24');
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', 'verbs a second over the last two minutes');
  const top = Math.max(1, ...rates.map((r) => r.verbs));
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
  line.setAttribute('points', rates.map((r, i) => `${120 - rates.length + i},${23 - 22 * r.verbs / top}`).join(' '));
  svg.append(line);
  return svg;
}

function drawNodes(s) {
  const all = document.createDocumentFragment();
  for (const n of s.nodes || []) {
    const div = document.createElement('div');
    div.className = 'node ' + n.state;
    div.dataset.node = n.name;
    const head = text('h3', n.name);
    head.append(text('span', plain(n.state), 'badge ' + tone(n.state)));
    div.append(head, text('p', n.domain, 'dim'));
    const meter = document.createElement('div');
    meter.className = 'meter';
    const fill = document.createElement('i');
    fill.style.width = Math.min(100, 100 * n.hosted / Math.max(1, n.capacity)) + '%';
    meter.append(fill);
    div.append(meter, text('p', `${size(n.used)} used, ${size(n.hosted)} of ${size(n.capacity)} reserved by regions, ${size(n.resident)} taken`));
    div.append(text('p', `memory: ${n.persistence || 'not told'}`, 'dim'));
    if (n.trouble) div.append(text('p', n.trouble, 'bad'));
    if ((n.missing || []).length) div.append(text('p', `regions missing in its folder: ${n.missing.join(', ')}`, 'bad'));
    const rates = (s.rates || {})[n.id] || [];
    const r = rates[rates.length - 1];
    const lanes = Object.entries(n.lanes || {}).map(([k, v]) => `${v} ${k}`).join(', ') || 'no';
    div.append(text('p', n.answers ? `${r ? count(r.verbs) : '-'} verbs/s, ${r ? size(r.read) : '-'}/s read, ${r ? size(r.written) : '-'}/s written` : n.asked ? 'its agent does not answer' : '- verbs/s', n.asked && !n.answers ? 'bad' : ''));
    div.append(text('p', `${lanes} connections` + (n.answers ? `, agent answers in ${(n.answer_us / 1000).toFixed(1)} ms` : '') + ((n.rails || []).length ? `, rails ${n.rails.join(', ')}` : ''), 'dim'), spark(rates));
    all.append(div);
  }
  $('nodes').replaceChildren(all);
}

function draw(s) {
  const regions = s.regions || [];
  const down = regions.find((r) => r.state === 'lost' || r.state === 'unavailable');
  const worse = (s.nodes || []).some((n) => n.state !== 'up' && n.state !== 'removed') || regions.some((r) => r.state !== 'open');
  const health = $('health');
  health.textContent = s.error ? 'no controller answers' : down ? `data is ${down.state}` : worse ? 'degraded' : 'healthy';
  health.className = 'badge ' + (s.error || down ? 'bad' : worse ? 'warn' : 'good');
  $('error').hidden = !s.error;
  $('error').textContent = s.error ? `The controllers do not answer; what follows is older. ${s.error}` : '';
  $('facts').textContent = `cluster ${(s.cluster || '').slice(0, 8)}, ${s.version}, revision ${s.revision}, ${s.sessions} sessions (${s.fenced} fenced)`;
  const name = Object.fromEntries((s.nodes || []).map((n) => [n.id, n.name]));
  drawNodes(s);
  rows('controllers', s.controllers || [], (tr, c) => tr.append(text('td', c.name), text('td', c.url), text('td', c.leader ? 'leader' : 'standby', c.leader ? 'good' : '')));
  rows('regions', s.regions || [], (tr, r) => {
    tr.className = 'pick' + (chosen && chosen.region === r.id ? ' chosen' : '');
    tr.tabIndex = 0;
    tr.dataset.region = r.id;
    const state = text('td', '');
    state.append(text('span', plain(r.state) + (r.rebuilt >= 0 ? ` ${Math.round(100 * r.rebuilt)} %` : ''), 'badge ' + tone(r.state)));
    const where = text('td', '');
    r.replicas.forEach((p, i) => where.append(i ? ', ' : '', text('span', name[p.node] || `node ${p.node}`, tone(p.state)), p.state === 'in_sync' ? '' : ` (${plain(p.state)})`));
    if (r.replicas.length < r.want) where.append(text('span', ` of ${r.want}`, 'bad'));
    tr.append(text('td', r.id), state, text('td', size(r.bytes)), text('td', r.holds + (r.durable ? ', durable' : '') + (r.tenant ? `, tenant ${r.tenant}` : '')), text('td', r.epoch), where);
    const pick = () => { chosen = r.replicas.length ? { region: r.id, node: r.replicas[0].node, name: name[r.replicas[0].node] } : null; draw(s); drawMap(); };
    tr.onclick = pick;
    tr.onkeydown = (e) => { if (e.key === 'Enter') pick(); };
  });
  const of = (used, quota, show) => quota ? `${show(used)} of ${show(quota)}` : show(used);
  rows('tenants', s.tenants || [], (tr, t) => tr.append(text('td', t.name), text('td', t.regions), text('td', of(t.bytes, t.quota_bytes, size)), text('td', of(t.sessions, t.quota_sessions, count)), text('td', of(t.lanes, t.quota_lanes, count))));
  rows('jobs', s.jobs || [], (tr, j) => tr.append(text('td', j.id), text('td', j.plugin), text('td', j.state, tone(j.state)), text('td', j.phase), text('td', j.input), text('td', j.output), text('td', j.priority)));
  const events = document.createDocumentFragment();
  for (const e of s.events || []) {
    const li = document.createElement('li');
    const t = text('time', new Date(e.at).toLocaleTimeString());
    t.dateTime = e.at;
    li.append(t, text('span', e.text, e.bad ? 'bad' : ''));
    events.append(li);
  }
  if (!(s.events || []).length) events.append(text('li', 'nothing has changed since the controller started', 'dim'));
  $('events').replaceChildren(events);
  if (!chosen && s.regions && s.regions.length && s.regions[0].replicas.length) {
    const r = s.regions[0];
    chosen = { region: r.id, node: r.replicas[0].node, name: name[r.replicas[0].node] };
    drawMap();
  }
}

// Header states of proto.BlockState.
const blockState = ['free', 'being formatted', 'open', 'draining', 'being reclaimed'];
// Sizes of the classes, as the table of proto.Class has them.
const classBytes = [];
for (let s = 64; s <= 1 << 20; s *= 2) {
  for (let q = 0; q < 4; q++) {
    const step = s + q * s / 4 + (s >= 512 && s < 1 << 17 ? 64 : 0);
    if (step <= 1 << 20 && (1 << 20) % step <= 1 << 16) classBytes.push(step);
  }
}
const classSize = (c) => size(classBytes[c] || 0);
// Kinds of slabs, as proto.Kind numbers them.
const kinds = ['mutable', 'write-once', 'mutable, staged'];
const kindOf = (kc) => kinds[kc >> 6] || `kind ${kc >> 6}`;
const hue = (c) => 210 + c * 22;
const colour = (kind, cls, fill) => `hsl(${hue(cls) % 360} ${[60, 75, 90][kind] || 30}% ${80 - 45 * fill / 255}%)`;
let cells = null; // of the map drawn last: {bytes, columns, side}

function paint(bytes) {
  const canvas = $('map'), n = bytes.length / 3;
  const began = performance.now();
  const columns = Math.max(1, Math.ceil(Math.sqrt(n * 2)));
  const side = Math.max(1, Math.floor(canvas.width / columns));
  canvas.height = Math.max(side, side * Math.ceil(n / columns));
  const g = canvas.getContext('2d');
  g.clearRect(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < n; i++) {
    const state = bytes[3 * i], kc = bytes[3 * i + 1], fill = bytes[3 * i + 2];
    const x = (i % columns) * side, y = Math.floor(i / columns) * side;
    if (state === 0) g.fillStyle = 'hsl(0 0% 50% / .12)';
    else if (state === 2) g.fillStyle = colour(kc >> 6, kc & 63, fill);
    else g.fillStyle = state === 255 ? 'hsl(0 80% 45%)' : 'hsl(45 90% 50%)';
    g.fillRect(x, y, side - 1, side - 1);
  }
  cells = { bytes, columns, side };
  canvas.dataset.blocks = n;
  canvas.dataset.paintMs = (performance.now() - began).toFixed(2);
  const used = new Set();
  for (let i = 0; i < n; i++) if (bytes[3 * i] === 2) used.add(bytes[3 * i + 1]);
  const legend = document.createDocumentFragment();
  for (const kc of [...used].sort((a, b) => (a & 63) - (b & 63))) {
    const span = document.createElement('span'), dot = document.createElement('i');
    dot.style.background = colour(kc >> 6, kc & 63, 160);
    span.append(dot, `${classSize(kc & 63)} ${kindOf(kc)}`);
    legend.append(span);
  }
  legend.append(text('span', 'darker: fuller; grey: free', 'dim'));
  $('legend').replaceChildren(legend);
}

async function drawMap() {
  if (!chosen) return;
  const of = chosen;
  try {
    const res = await fetch(at(`console/blocks?node=${of.node}&region=${of.region}`));
    if (!res.ok) throw new Error(await res.text());
    const bytes = new Uint8Array(await res.arrayBuffer());
    if (of !== chosen) return;
    $('map-of').textContent = `of region ${of.region} on ${of.name}`;
    paint(bytes);
  } catch (e) {
    $('map-of').textContent = `of region ${of.region}: ${e.message}`;
  }
}

$('map').onmousemove = (e) => {
  if (!cells) return;
  const box = $('map').getBoundingClientRect(), scale = $('map').width / box.width;
  const x = Math.floor((e.clientX - box.left) * scale / cells.side), y = Math.floor((e.clientY - box.top) * scale / cells.side);
  const i = y * cells.columns + x;
  if (x >= cells.columns || 3 * i + 2 >= cells.bytes.length) return;
  const state = cells.bytes[3 * i], kc = cells.bytes[3 * i + 1], fill = cells.bytes[3 * i + 2];
  const open = state === 2 || state === 3;
  $('tip').textContent = `block ${i}: ${state === 255 ? 'damaged header' : blockState[state] || state}` +
    (open ? `, slabs of ${classSize(kc & 63)}, ${kindOf(kc)}, ${Math.round(fill / 2.55)} % taken` : '');
};

async function tick() {
  try {
    const res = await fetch(at('console/state'));
    if (!res.ok) throw new Error(`${res.status} ${await res.text()}`);
    draw(await res.json());
  } catch (e) {
    $('health').textContent = 'this controller does not answer';
    $('health').className = 'badge bad';
    $('error').hidden = false;
    $('error').textContent = `This controller does not answer: ${e.message}`;
  }
}

tick();
setInterval(tick, 1000);
setInterval(drawMap, 2000);
