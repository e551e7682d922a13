// Uses every call of the control plane with E2B's JavaScript SDK, unchanged: the same as control_plane.py. Takes the address and the API key from
// the environment: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY. The sandboxes may be fakes: nothing runs in them.
import assert from "node:assert/strict";
import {
  ALL_TRAFFIC,
  AuthenticationError,
  E2B,
  InvalidArgumentError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  Secret,
  SecretError,
  Volume,
  VolumeError,
} from "e2b";

const HOUR_MS = 3_600_000;
const ODD = "a=b&c d+%2B/\u{1f9ca}'()*!~\n";
const NOBODY = "0123456789ab";

/** The ids of the sandboxes that a list has, on all its pages. */
async function pages(options) {
  const paginator = Sandbox.list(options);
  const found = [];
  while (paginator.hasNext) {
    found.push(...(await paginator.nextItems()));
  }
  return found.map((sandbox) => sandbox.sandboxId);
}

/** Checks that a call fails with an error of this class and with this HTTP status. */
async function fails(call, Kind, status) {
  await assert.rejects(call, (error) => {
    assert(error instanceof Kind, error);
    assert.equal(error.statusCode, status, error);
    return true;
  });
}

/** Checks that this node says that it does not have what the call needs. */
async function isUnsupported(call, Kind = SandboxError) {
  await assert.rejects(call, (error) => {
    assert(error instanceof Kind && error.message.startsWith("501: "), error);
    return true;
  });
}

async function creation() {
  const metadata = { owner: "sdk", [ODD]: ODD };
  const sandbox = await Sandbox.create({ timeoutMs: 60_000, metadata, envs: { A: "1" } });
  const info = await sandbox.getInfo();
  assert.deepEqual(
    [info.sandboxId, info.templateId, info.name, info.state],
    [sandbox.sandboxId, "base", "base", "running"],
  );
  assert.deepEqual(info.metadata, metadata);
  assert(info.cpuCount > 0 && info.memoryMB > 0 && info.startedAt <= new Date(), JSON.stringify(info));
  assert.deepEqual(info.lifecycle, { onTimeout: "kill", autoResume: false });
  assert(sandbox.getHost(3000).startsWith(`3000-${sandbox.sandboxId}.`), sandbox.getHost(3000));
  const url = new URL(await sandbox.uploadUrl("/x", { useSignatureExpiration: 60 }));
  assert(url.searchParams.get("signature").startsWith("v1_") && url.searchParams.has("signature_expiration"), `${url}`);

  await sandbox.setTimeout(HOUR_MS);
  const left = (await sandbox.getInfo()).endAt - new Date();
  assert(left > 0.97 * HOUR_MS && left < 1.03 * HOUR_MS, `${left} ms`);
  console.log("created");
  return sandbox;
}

async function lists(sandbox) {
  const create = () => Sandbox.create("base", { metadata: { owner: "other" }, timeoutMs: 600_000 });
  const others = await Promise.all([create(), create(), create(), create()]);
  assert.deepEqual(await pages({ query: { metadata: { [ODD]: ODD } } }), [sandbox.sandboxId]);
  const all = [sandbox, ...others].map(({ sandboxId }) => sandboxId).sort();
  assert.deepEqual((await pages({ limit: 2 })).sort(), all);
  assert.deepEqual((await pages({ query: { state: ["running", "paused"] } })).sort(), all);
  assert.deepEqual(await pages({ order: "asc" }), (await pages({ order: "desc", limit: 1 })).reverse());
  assert.deepEqual(await pages({ query: { template: "nothing" } }), []);
  assert.deepEqual((await pages({ query: { template: "base" } })).sort(), all);
  assert.deepEqual(await pages({ query: { startedAfter: new Date(Date.now() + HOUR_MS) } }), []);
  const client = new E2B({ apiKey: process.env.E2B_API_KEY });
  assert.equal((await client.Sandbox.list({ limit: 3 }).nextItems()).length, 3);
  await fails(Sandbox.list({ limit: 101 }).nextItems(), SandboxError, 400);
  console.log("listed");
}

async function pauses(sandbox) {
  assert.equal(await sandbox.pause(), true);
  assert.equal(await sandbox.pause(), false);
  assert.deepEqual(await pages({ query: { state: ["paused"] } }), [sandbox.sandboxId]);
  await fails(sandbox.setTimeout(60_000), SandboxError, 409);
  await isUnsupported(Sandbox.connect(sandbox.sandboxId, { onResume: "reboot" }));
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 120_000 });
  assert.equal(await again.downloadUrl("/x"), await sandbox.downloadUrl("/x"), "it has the same token");
  assert.equal((await again.getInfo()).state, "running");
  assert.equal(await again.connect({ timeoutMs: 240_000 }), again);

  const lifecycle = { onTimeout: "pause", autoResume: true };
  const paused = await Sandbox.create({ lifecycle });
  assert.deepEqual((await paused.getInfo()).lifecycle, lifecycle);
  await isUnsupported(Sandbox.create({ lifecycle: { onTimeout: { action: "pause", keepMemory: false } } }));
  await assert.rejects(Sandbox.create({ lifecycle: { autoResume: true } }), InvalidArgumentError);
  console.log("paused");
}

async function networks() {
  const network = { allowOut: ["192.0.2.0/24"], denyOut: ({ allTraffic }) => [allTraffic] };
  const closed = await Sandbox.create({ allowInternetAccess: false, network });
  await closed.updateNetwork({ denyOut: ["192.0.2.7"] });
  await closed.updateNetwork({ allowOut: ["192.0.2.8"], denyOut: [ALL_TRAFFIC] });
  await closed.updateNetwork({ allowInternetAccess: false });
  await fails(closed.updateNetwork({ allowOut: ["pypi.org"] }), SandboxError, 400);
  await fails(Sandbox.create({ network: { denyOut: ["::1"] } }), SandboxError, 400);
  for (const unsupported of [
    { egressProxy: { address: "192.0.2.1:1080" } },
    { maskRequestHost: "example.com" },
    { httpsPorts: [443] },
    { rules: { "example.com": [{ transform: { headers: { A: "b" } } }] } },
  ]) {
    await isUnsupported(Sandbox.create({ network: unsupported }));
  }
  const hidden = await Sandbox.create({ network: { allowPublicTraffic: false } });
  assert.equal((await hidden.getInfo()).network.allowPublicTraffic, false);
  assert.equal((await Sandbox.connect(hidden.sandboxId)).trafficAccessToken, hidden.trafficAccessToken);
  const url = `${process.env.E2B_SANDBOX_URL}/`;
  const headers = { "E2b-Sandbox-Id": hidden.sandboxId, "E2b-Sandbox-Port": "3000" };
  assert.equal((await fetch(url, { headers })).status, 403);
  headers["e2b-traffic-access-token"] = hidden.trafficAccessToken;
  assert.equal((await fetch(url, { headers })).status, 502, "no program listens");
  assert.equal(closed.trafficAccessToken, undefined);
  console.log("networks");
}

async function snapshots(sandbox) {
  const snapshot = await sandbox.createSnapshot({ name: "warm" });
  assert.deepEqual(snapshot.names, ["warm"]);
  assert.deepEqual(await sandbox.listSnapshots().nextItems(), [snapshot]);
  assert.deepEqual(await Sandbox.listSnapshots({ name: "warm" }).nextItems(), [snapshot]);
  assert.deepEqual(await Sandbox.listSnapshots({ name: "nothing" }).nextItems(), []);
  const thawed = await Sandbox.create(snapshot.snapshotId, { metadata: { of: "snapshot" } });
  assert.equal((await thawed.getInfo()).templateId, snapshot.snapshotId);
  assert.equal((await (await Sandbox.create("warm")).getInfo()).name, "warm");
  const forks = await sandbox.fork({ count: 2, timeoutMs: 600_000 });
  assert(forks.length === 2 && forks.every((fork) => fork instanceof Sandbox), `${forks}`);
  assert.equal((await forks[0].getInfo()).metadata[ODD], ODD);
  assert.equal((await Sandbox.fork(sandbox.sandboxId, { timeoutMs: 600_000 })).length, 1);
  assert.equal((await sandbox.getMetrics()).length, 1);
  assert.equal((await sandbox.getMetrics({ start: new Date(Date.now() + HOUR_MS) })).length, 0);
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true);
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false);
  console.log("snapshots and forks");
}

async function refusals(sandbox) {
  await fails(Sandbox.create("nothing"), SandboxError, 404);
  await isUnsupported(Sandbox.create({ mcp: {} }));
  await isUnsupported(Sandbox.create({ volumeMounts: { "/data": "x" } }));
  await isUnsupported(Sandbox.create({ iam: { tokens: { x: { audience: "a", tokenType: "jwt" } } } }));
  await isUnsupported(sandbox.pause({ keepMemory: false }));
  await isUnsupported(Volume.create("x"), VolumeError);
  await isUnsupported(Secret.create("x", "y"), SecretError);
  await assert.rejects(Sandbox.create({ apiKey: "wrong" }), AuthenticationError);
  for (const call of ["connect", "getInfo", "getMetrics", "pause", "fork", "createSnapshot"]) {
    await assert.rejects(Sandbox[call](NOBODY), SandboxNotFoundError, call);
  }
  await assert.rejects(Sandbox.setTimeout(NOBODY, 1000), SandboxNotFoundError);
  await assert.rejects(Sandbox.updateNetwork(NOBODY, {}), SandboxNotFoundError);
  assert.equal(await Sandbox.kill(NOBODY), false);
  console.log("refused");
}

const sandbox = await creation();
await lists(sandbox);
await pauses(sandbox);
await networks();
await snapshots(sandbox);
await refusals(sandbox);
assert.equal(await sandbox.kill(), true);
assert.equal(await sandbox.kill(), false);
assert.equal(await sandbox.isRunning(), false);
for (const id of await pages()) {
  assert.equal(await Sandbox.kill(id), true);
}
assert.deepEqual(await pages(), []);
console.log(`e2b at ${process.env.E2B_API_URL}: good`);
