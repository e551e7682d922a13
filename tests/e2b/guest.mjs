// What only a real guest can show, with E2B's JavaScript SDK, unchanged: signed URLs, a pause and a connect, a fork, a snapshot, a port, metrics, a
// timeout. Prints what each step came to.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import { AuthenticationError, Sandbox, SandboxNotFoundError, TimeoutError } from "e2b";

/** Asks until the answer is there. */
async function until(what, ask) {
  const deadline = Date.now() + 60_000;
  while (!(await ask())) {
    assert(Date.now() < deadline, what);
    await sleep(500);
  }
}

/** The headers that name a port where all sandboxes have one URL. */
function named(sandbox, port) {
  return { "E2b-Sandbox-Id": sandbox.sandboxId, "E2b-Sandbox-Port": String(port) };
}

const sandbox = await Sandbox.create({ timeoutMs: 600_000, metadata: { who: "node" }, envs: { COLOUR: "blue" } });
assert.equal((await sandbox.commands.run("echo $COLOUR")).stdout, "blue\n");
await sandbox.files.write("/kept", "before");
await assert.rejects(sandbox.commands.run("exit 3"), { name: "CommandExitError", exitCode: 3 });
console.log("created", sandbox.sandboxId);

const server = await sandbox.commands.run("exec python3 -m http.server 8000 --directory /", {
  background: true,
  timeoutMs: 0,
});
await until("the port is open", async () => {
  const answer = await fetch(`${process.env.E2B_SANDBOX_URL}/kept`, { headers: named(sandbox, 8000) });
  const body = await answer.text();
  // 502: it does not listen yet.
  assert(answer.status === 502 || body === "before", body);
  return answer.ok;
});
console.log("port");

// With one URL for all sandboxes a signed URL needs the headers that name the sandbox, but not the token.
const headers = named(sandbox, 49983);
const form = new FormData();
form.append("file", new Blob(["sent"]), "sent");
const upload = await sandbox.uploadUrl("/sent", { useSignatureExpiration: 600 });
assert.equal((await fetch(upload, { method: "POST", body: form, headers })).status, 200);
const download = await sandbox.downloadUrl("/sent", { useSignatureExpiration: 600 });
assert.equal(await (await fetch(download, { headers })).text(), "sent");
const past = await sandbox.downloadUrl("/sent", { useSignatureExpiration: -1 });
const other = download.replace("%2Fsent", "%2Fkept");
assert.notEqual(other, download);
for (const wrong of [past, other, upload]) {
  assert.equal((await fetch(wrong, { headers })).status, 401, wrong);
}
const stranger = new Sandbox({ sandboxId: sandbox.sandboxId, envdVersion: "0.6.4", envdAccessToken: "wrong" });
await assert.rejects(stranger.files.read("/kept"), AuthenticationError);
await assert.rejects(stranger.files.list("/"), AuthenticationError);
await assert.rejects(stranger.commands.run("true"), AuthenticationError);
console.log("signed");

assert.equal(await sandbox.pause(), true);
assert.equal(await sandbox.isRunning(), false);
await assert.rejects(sandbox.commands.run("true"), SandboxNotFoundError);
await assert.rejects(sandbox.files.read("/kept"), TimeoutError);
const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 600_000 });
assert.equal(await again.files.read("/kept"), "before");
assert((await sandbox.commands.list()).some((process) => process.pid === server.pid));
console.log("paused and connected");

const [fork] = await sandbox.fork({ timeoutMs: 600_000 });
assert(fork instanceof Sandbox, fork);
await fork.files.write("/kept", "in the fork");
assert.equal(await sandbox.files.read("/kept"), "before");
await fork.kill();
console.log("forked");

const snapshot = await sandbox.createSnapshot({ name: "warm" });
const thawed = await Sandbox.create("warm", { envs: { COLOUR: "red" } });
assert.equal(await thawed.files.read("/kept"), "before");
assert.equal((await thawed.commands.run("echo $COLOUR")).stdout, "red\n");
assert.notEqual(thawed.sandboxId, sandbox.sandboxId);
await thawed.kill();
assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true);
console.log("snapshot");

const [measured] = await sandbox.getMetrics();
assert(measured.memTotal > 0 && measured.cpuCount === 1, JSON.stringify(measured));
await sandbox.setTimeout(1000);
await until("a timeout kills the sandbox", async () => !(await sandbox.isRunning()));
await assert.rejects(Sandbox.connect(sandbox.sandboxId), SandboxNotFoundError);
console.log("timeout");
