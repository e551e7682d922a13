// Builds templates with E2B's JavaScript SDK, unchanged, and makes sandboxes of them: the same as templates.py. Takes the address and the API key from
// the environment, as control_plane.mjs does. The guest needs a shell and coreutils; all files are made below one directory of /tmp.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { mkdir, mkdtemp, rm, symlink, writeFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { BuildError, Sandbox, SandboxError, Template, TemplateError, waitForFile } from "e2b";

// In the guest. Guests of the tests over fakes share the host's files.
const PLACE = `/tmp/e2b-templates-${randomUUID()}`;
const NAMES = ["javascript", "javascript-above", "javascript-fails"];

function template(fileContextPath) {
  return Template({ fileContextPath }).fromTemplate("base");
}

/** Builds a template, and returns what the build said of it and its log. */
async function build(built, name, options) {
  const log = [];
  const info = await Template.build(built, name, { ...options, onBuildLogs: (entry) => log.push(entry.message) });
  return { info, log };
}

async function tags(name) {
  return (await Template.getTags(name)).map(({ tag }) => tag).sort();
}

const context = await mkdtemp("/tmp/e2b-context-");
await mkdir(`${context}/app/lib`, { recursive: true });
await writeFile(`${context}/app/main.txt`, "main");
await writeFile(`${context}/app/lib/part.txt`, "part");
await writeFile(`${context}/notes.txt`, "notes");
await symlink("notes.txt", `${context}/link.txt`);

const steps = template(context)
  .setEnvs({ COLOUR: "blue", BOTH: "$COLOUR and green" })
  .setWorkdir(`${PLACE}/work`)
  .copy("app", `${PLACE}/app`)
  .copy("notes.txt", `${PLACE}/renamed.txt`, { mode: 0o640, gzip: false })
  .copy("link.txt", `${PLACE}/linked/`, { resolveSymlinks: true, forceUpload: true })
  .makeDir(`${PLACE}/made`)
  .rename(`${PLACE}/made`, `${PLACE}/moved`)
  .makeSymlink(`${PLACE}/moved`, `${PLACE}/link`)
  .runCmd(["echo $BOTH > said", "pwd"])
  .runCmd("id -un", { user: "root" })
  .setStartCmd(`touch ${PLACE}/begun; exec sleep 30`, waitForFile(`${PLACE}/begun`));
const { info, log } = await build(steps, "javascript:v1", { tags: ["stable"], minFreeDiskMb: 64 });
assert.deepEqual([info.name, [...info.tags].sort()], ["javascript:v1", ["stable", "v1"]]);
assert(log.includes(`${PLACE}/work`) && log.includes("root"), log.join("\n"));
const ready = await Template.getBuildStatus(info);
assert.deepEqual([ready.status, ready.buildID, ready.reason], ["ready", info.buildId, undefined]);
assert(ready.logEntries.length > 0 && ready.logEntries.every((entry) => entry.timestamp instanceof Date));
console.log("built", info.templateId);

const sandbox = await Sandbox.create("javascript:v1", { timeoutMs: 300_000 });
assert.equal((await sandbox.getInfo()).templateId, info.templateId);
const said = await sandbox.commands.run("pwd; cat said; echo $COLOUR");
assert.equal(said.stdout, `${PLACE}/work\nblue and green\nblue\n`);
const copied = ["app/main.txt", "app/lib/part.txt", "renamed.txt", "linked/link.txt"].map((path) => `${PLACE}/${path}`);
assert.equal((await sandbox.commands.run(`cat ${copied.join(" ")}`)).stdout, "mainpartnotesnotes");
const kinds = await sandbox.commands.run(`stat -c '%a %F' ${PLACE}/renamed.txt ${PLACE}/linked/link.txt; readlink ${PLACE}/link`);
const [renamed, linked, link] = kinds.stdout.split("\n");
assert.deepEqual([renamed, linked.slice(4), link], ["640 regular file", "regular file", `${PLACE}/moved`]);
assert.equal((await sandbox.commands.run("echo $COLOUR", { envs: { COLOUR: "red" } })).stdout, "red\n");
await sandbox.kill();
console.log("created");

// A name without a tag means `default`, which no build has yet.
await assert.rejects(Sandbox.create("javascript"), SandboxError);
assert.deepEqual([await Template.exists("javascript"), await Template.exists("nothing")], [true, false]);
assert.deepEqual(await tags("javascript"), ["stable", "v1"]);
const assigned = await Template.assignTags("javascript:v1", ["default", "production"]);
assert.deepEqual([assigned.buildId, [...assigned.tags].sort()], [info.buildId, ["default", "production"]]);
await (await Sandbox.create("javascript", { timeoutMs: 60_000 })).kill();
await Template.removeTags("javascript", "production");
assert.deepEqual(await tags("javascript"), ["default", "stable", "v1"]);
await assert.rejects(Template.removeTags("javascript", "production"), TemplateError);
console.log("tagged");

// On top of it.
const above = Template().fromTemplate("javascript").runCmd("test -f said && echo $BOTH");
assert((await build(above, "javascript-above")).log.includes("blue and green"));
await assert.rejects(build(above, "javascript-above", { minFreeDiskMb: 64 }), BuildError);

const failing = template().runCmd("true").runCmd("echo the reason >&2; exit 3");
const background = await Template.buildInBackground(failing, "javascript-fails");
await assert.rejects(build(failing, "javascript-fails"), (error) => {
  assert(error instanceof BuildError && error.message.includes("the reason") && error.message.includes("3"), error);
  return true;
});
let status;
do {
  await sleep(100);
  status = await Template.getBuildStatus(background);
} while (["waiting", "building"].includes(status.status));
assert.deepEqual([status.status, status.reason.step], ["error", "2"]);
assert(status.reason.logEntries.some((entry) => entry.message.includes("the reason")), JSON.stringify(status));
await assert.rejects(Sandbox.create("javascript-fails"), SandboxError);
await assert.rejects(build(template(context).copy("missing", "/x"), "javascript-fails"), /No files found/);
const registry = Template().fromImage("x", { username: "a", password: "b" });
await assert.rejects(build(registry, "javascript-fails"), { name: "BuildError", message: /^501: / });
await assert.rejects(build(template(), "base"), { name: "BuildError", message: /^409: / });
console.log("failed as it should");

// In E2B's API a template is deleted as a snapshot is.
for (const name of NAMES) {
  assert.equal(await Sandbox.deleteSnapshot(name), true);
  assert.equal(await Template.exists(name), false);
}
await rm(context, { recursive: true });
await rm(PLACE, { recursive: true, force: true });
assert.equal(await Sandbox.deleteSnapshot("javascript"), false);
console.log("templates: good");
