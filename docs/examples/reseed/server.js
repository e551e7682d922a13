// Node: a server that a request renews after each thaw, `--after-thaw http:9000/thawed`.
//
// GET /key is a key, GET /id a random number that is no secret, and GET /upstream an answer of the service at $UPSTREAM (HOST:PORT).
'use strict';

const { once } = require('node:events');
const { openSync, readSync } = require('node:fs');
const { createServer } = require('node:http');
const { connect } = require('node:net');
const { createInterface } = require('node:readline');

const kernel = openSync('/dev/urandom', 'r');

// Bytes of the kernel's generator, at most 256: a read of so many is never short. Use it in place of crypto.randomBytes, whose generator
// is in this process and cannot be reseeded. A worker does not help: its generators get their seed from this process.
function kernelRandom(length) {
  const bytes = Buffer.alloc(length);
  readSync(kernel, bytes, 0, length, null);
  return bytes;
}

// Math.random cannot be reseeded either. So packages that call it differ in each clone too.
Math.random = () => kernelRandom(6).readUIntBE(0, 6) / 2 ** 48;

function connectUpstream() {
  const [, host, port] = process.env.UPSTREAM.match(/^(.*):(\d+)$/);
  const socket = connect(Number(port), host);
  const lines = createInterface({ input: socket });
  socket.on('error', (why) => console.error(`upstream: ${why.message}`));
  socket.on('close', () => lines.close());
  return { socket, lines: lines[Symbol.asyncIterator]() };
}

let upstream = connectUpstream();

async function askUpstream() {
  if (upstream.socket.destroyed) upstream = connectUpstream();
  const { socket, lines } = upstream;
  socket.write('ping\n');
  const { value, done } = await lines.next();
  if (done) throw new Error('the upstream closed the connection');
  return value;
}

const pages = {
  '/key': () => kernelRandom(32).toString('hex'),
  '/id': () => Math.random().toString(16).slice(2),
  '/upstream': askUpstream,
};

createServer(async (request, answer) => {
  const page = pages[request.url];
  try {
    if (page) answer.end(`${await page()}\n`);
    else answer.writeHead(404).end();
  } catch (why) {
    answer.writeHead(502).end(`${why.message}\n`);
  }
}).listen(8000, '0.0.0.0');

// The hook's, on a port that is not published. It succeeds once the clone has a connection of its own.
createServer(async (request, answer) => {
  if (request.method !== 'POST' || request.url !== '/thawed') {
    answer.writeHead(404).end();
    return;
  }
  upstream.socket.destroy(); // the original's
  upstream = connectUpstream();
  try {
    await once(upstream.socket, 'connect');
    answer.writeHead(204).end();
  } catch (why) {
    answer.writeHead(502).end(`${why.message}\n`);
  }
}).listen(9000, '127.0.0.1');
