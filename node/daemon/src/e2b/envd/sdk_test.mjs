// What users of E2B's JavaScript SDK do with a sandbox: the same as sdk_test.py. Each step prints its name.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import {
  CommandExitError,
  FileNotFoundError,
  FilesystemEventType,
  FileType,
  InvalidArgumentError,
  NotFoundError,
  RateLimitError,
  Sandbox,
  TimeoutError,
} from "e2b";

const NO_PROCESS = 999_999;
const bytes = (text) => new TextEncoder().encode(text);
const text = (data) => new TextDecoder().decode(data);

async function until(what, isSo) {
  const end = Date.now() + 20_000;
  while (!isSo()) {
    assert(Date.now() < end, what);
    await sleep(50);
  }
}

async function commands(sandbox) {
  const done = await sandbox.commands.run("echo $A; pwd; echo err >&2", { envs: { A: "1" }, cwd: "/root" });
  assert(done.stdout.startsWith("1\n") && done.stdout.endsWith("/root\n"), done.stdout);
  assert.deepEqual([done.stderr, done.exitCode, done.error], ["err\n", 0, undefined]);
  await assert.rejects(sandbox.commands.run("echo out; echo err >&2; exit 7"), (failed) => {
    assert(failed instanceof CommandExitError, failed);
    assert.deepEqual([failed.exitCode, failed.stdout, failed.stderr], [7, "out\n", "err\n"]);
    return true;
  });
  const long = await sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x");
  assert.equal(long.stdout.length, 5_000_000);
  const heard = { out: "", err: "" };
  await sandbox.commands.run("echo a; echo ü; echo c >&2", {
    onStdout: (data) => (heard.out += data),
    onStderr: (data) => (heard.err += data),
  });
  assert.deepEqual(heard, { out: "a\nü\n", err: "c\n" });
  await assert.rejects(sandbox.commands.run("sleep 30", { timeoutMs: 1000 }), TimeoutError);
  const many = Array.from({ length: 20 }, (_, n) => sandbox.commands.run(`echo ${n}`));
  const said = (await Promise.all(many)).map(({ stdout }) => stdout);
  assert.deepEqual(said, Array.from(many, (_, n) => `${n}\n`));
  console.log("commands");
}

async function background(sandbox) {
  const handle = await sandbox.commands.run("cat", { background: true, stdin: true });
  const listed = (await sandbox.commands.list()).find(({ pid }) => pid === handle.pid);
  assert.deepEqual([listed.cmd, listed.args], ["/bin/bash", ["-l", "-c", "cat"]]);
  await sandbox.commands.sendStdin(handle.pid, "one\n");
  await handle.sendStdin(bytes("two\n"));
  await handle.closeStdin();
  assert.equal((await handle.wait()).stdout, "one\ntwo\n");
  const sleeper = await sandbox.commands.run("exec sleep 60", { background: true });
  assert.equal(await sleeper.kill(), true);
  assert.equal(await sandbox.commands.kill(NO_PROCESS), false);
  await assert.rejects(sleeper.wait(), { name: "CommandExitError", exitCode: 137 });
  await assert.rejects(sandbox.commands.connect(NO_PROCESS), NotFoundError);
  await assert.rejects(sandbox.commands.sendStdin(NO_PROCESS, "x"), NotFoundError);
  const asker = await sandbox.commands.run("read x; echo got $x", { background: true, stdin: true });
  await asker.disconnect();
  const again = await sandbox.commands.connect(asker.pid);
  await again.sendStdin("it\n");
  assert((await again.wait()).stdout.endsWith("got it\n"));
  console.log("background");
}

/** A process has so many readers at most. */
async function readers(sandbox) {
  const process = await sandbox.commands.run("exec sleep 60", { background: true });
  const handles = [process];
  const connect = async () => {
    while (handles.length < 100) {
      handles.push(await sandbox.commands.connect(process.pid));
    }
  };
  await assert.rejects(connect(), RateLimitError);
  assert.equal(await sandbox.commands.kill(process.pid), true);
  for (const handle of handles) {
    await assert.rejects(handle.wait(), CommandExitError);
  }
  console.log("readers");
}

async function terminal(sandbox) {
  let heard = "";
  const pty = await sandbox.pty.create({ rows: 24, cols: 80, onData: (data) => (heard += text(data)) });
  await sandbox.pty.resize(pty.pid, { rows: 30, cols: 100 });
  await sandbox.pty.sendInput(pty.pid, bytes("echo a$((1+1))b; exit\n"));
  await pty.wait();
  assert(heard.includes("a2b"), heard);
  assert.equal(await sandbox.pty.kill(NO_PROCESS), false);
  console.log("terminal");
}

async function files(sandbox) {
  const written = await sandbox.files.write("dir/a.txt", "hello");
  assert.deepEqual([written.name, written.path], ["a.txt", "/root/dir/a.txt"]);
  assert.equal(await sandbox.files.read("dir/a.txt"), "hello");
  assert.equal(text(await sandbox.files.read("/root/dir/a.txt", { format: "bytes" })), "hello");
  assert.equal(await (await sandbox.files.read("dir/a.txt", { format: "blob" })).text(), "hello");
  await sandbox.files.write("/empty", "");
  assert.equal(await sandbox.files.read("/empty"), "");
  const large = new Uint8Array(256 * 20_000).map((_, at) => at);
  for (const [data, options] of [
    [large.buffer, {}],
    [new Blob([large]), { gzip: true }],
    [new Blob([large]), { useOctetStream: true }],
    [new Blob([large]).stream(), {}],
    [new Blob([large]).stream(), { gzip: true }],
  ]) {
    await sandbox.files.write("/large", data, options);
    const read = await sandbox.files.read("/large", { format: "bytes", gzip: true });
    assert(Buffer.from(read).equals(Buffer.from(large)), JSON.stringify(options));
    await sandbox.files.remove("/large");
  }
  await sandbox.files.write("/large", large.buffer);
  const pieces = [];
  for await (const piece of await sandbox.files.read("/large", { format: "stream" })) {
    pieces.push(piece);
  }
  assert(Buffer.concat(pieces).equals(Buffer.from(large)));
  const several = [
    { path: "/m/1", data: "1" },
    { path: "/m/2 ü", data: new Blob(["2"]) },
  ];
  assert.equal((await sandbox.files.write(several)).length, 2);
  assert.deepEqual((await sandbox.files.list("/m")).map(({ path }) => path), ["/m/1", "/m/2 ü"]);
  assert.equal((await sandbox.files.writeFiles(several, { useOctetStream: true })).length, 2);
  console.log("files");
}

async function directories(sandbox) {
  const found = await sandbox.files.getInfo("/m/2 ü");
  assert.deepEqual([found.name, found.type, found.size], ["2 ü", FileType.FILE, 1]);
  assert(found.modifiedTime > new Date(0) && found.symlinkTarget === undefined, JSON.stringify(found));
  assert.equal((await sandbox.files.getInfo("/m")).type, FileType.DIR);
  for (const call of ["read", "getInfo", "list"]) {
    await assert.rejects(sandbox.files[call]("/none"), FileNotFoundError, call);
  }
  await assert.rejects(sandbox.files.read("/none", { format: "stream" }), FileNotFoundError);
  await assert.rejects(sandbox.files.read("/m"), InvalidArgumentError);
  await assert.rejects(sandbox.files.list("/m", { depth: 0 }), InvalidArgumentError);
  await assert.rejects(sandbox.files.write("/m/1", "1", { metadata: { a: "b" } }), {
    name: "SandboxError",
    message: /^501: /,
  });
  assert.deepEqual([await sandbox.files.makeDir("/x/y"), await sandbox.files.makeDir("/x/y")], [true, false]);
  const moved = await sandbox.files.rename("/m/1", "/x/z/1");
  assert.deepEqual([moved.path, moved.size, moved.permissions], ["/x/z/1", 1, "-rw-r--r--"]);
  await assert.rejects(sandbox.files.rename("/none", "/x/none"), FileNotFoundError);
  assert.equal((await sandbox.files.list("/x", { depth: 2 })).length, 3);
  assert.deepEqual([await sandbox.files.exists("/x/z/1"), await sandbox.files.exists("/m/1")], [true, false]);
  await sandbox.files.remove("/x");
  await sandbox.files.remove("/x");
  assert.equal(await sandbox.files.exists("/x"), false);
  console.log("directories");
}

async function watches(sandbox) {
  const events = [];
  let ended = "no";
  const watch = await sandbox.files.watchDir("/m", (event) => events.push(event), {
    includeEntry: true,
    onExit: (error) => (ended = error?.name ?? "yes"),
  });
  await sandbox.files.write("/m/new", "x");
  const isNew = ({ type, name }) => type === FilesystemEventType.CREATE && name.startsWith("new");
  await until("the file is seen", () => events.some(isNew));
  await watch.stop();
  await until("the watch ends", () => ended !== "no");
  await assert.rejects(sandbox.files.watchDir("/none", () => {}), FileNotFoundError);
  const short = await sandbox.files.watchDir("/m", () => {}, {
    timeoutMs: 5000,
    onExit: (error) => (ended = error),
  });
  await until("the watch is too long", () => ended instanceof TimeoutError);
  await short.stop();
  console.log("watches");
}

const sandbox = await Sandbox.create({ timeoutMs: 600_000 });
assert.equal(await sandbox.isRunning(), true);
await commands(sandbox);
await background(sandbox);
await readers(sandbox);
await terminal(sandbox);
await files(sandbox);
await directories(sandbox);
await watches(sandbox);
assert.equal(await sandbox.kill(), true);
