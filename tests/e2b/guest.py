"""What only a real guest can show, with E2B's Python SDK, unchanged: a pause and a connect, a fork, a snapshot, a port, metrics, a timeout. Prints
what each step came to."""

import os
import time
import urllib.error
import urllib.request

from e2b import CommandExitException, Sandbox, SandboxNotFoundException

sandbox = Sandbox.create(timeout=600, metadata={"who": "node"}, envs={"COLOUR": "blue"})
assert sandbox.commands.run("echo $COLOUR").stdout == "blue\n"
sandbox.files.write("/kept", "before")
try:
    sandbox.commands.run("exit 3")
    raise AssertionError("a command that fails is an exception")
except CommandExitException as failed:
    assert failed.exit_code == 3
print("created", sandbox.sandbox_id)

SERVER = "exec python3 -m http.server 8000 --directory /"


def get(of, **headers):
    """What a server in a sandbox answers."""
    headers |= {"E2b-Sandbox-Id": of.sandbox_id, "E2b-Sandbox-Port": "8000"}
    asked = urllib.request.Request(f"{os.environ['E2B_SANDBOX_URL']}/kept", headers=headers)
    deadline = time.time() + 60
    while True:
        try:
            return urllib.request.urlopen(asked, timeout=30).read()
        except urllib.error.HTTPError as refused:
            # 502: it does not listen yet.
            if refused.code != 502 or time.time() > deadline:
                raise
            time.sleep(0.5)


server = sandbox.commands.run(SERVER, background=True)
assert get(sandbox) == b"before"
print("port")

hidden = Sandbox.create(timeout=600, network={"allow_public_traffic": False})
hidden.files.write("/kept", "hidden")
hidden.commands.run(SERVER, background=True)
token = {"e2b-traffic-access-token": hidden.traffic_access_token}
assert get(hidden, **token) == b"hidden"
try:
    get(hidden)
    raise AssertionError("a private port is open")
except urllib.error.HTTPError as refused:
    assert refused.code == 403, refused
hidden.kill()
print("private port")

assert sandbox.pause()
assert Sandbox.connect(sandbox.sandbox_id, timeout=600).files.read("/kept") == "before"
assert server.pid in [process.pid for process in sandbox.commands.list()]
print("paused and connected")

fork = sandbox.fork()[0]
fork.files.write("/kept", "in the fork")
assert sandbox.files.read("/kept") == "before"
fork.kill()
print("forked")

snapshot = sandbox.create_snapshot(name="warm")
thawed = Sandbox.create("warm", envs={"COLOUR": "red"})
assert thawed.files.read("/kept") == "before"
assert thawed.commands.run("echo $COLOUR").stdout == "red\n"
assert thawed.sandbox_id != sandbox.sandbox_id
thawed.kill()
assert Sandbox.delete_snapshot(snapshot.snapshot_id)
print("snapshot")

assert sandbox.get_metrics()[0].mem_total > 0
sandbox.set_timeout(1)
deadline = time.time() + 60
while sandbox.is_running():
    assert time.time() < deadline, "a timeout kills the sandbox"
    time.sleep(0.5)
try:
    Sandbox.connect(sandbox.sandbox_id)
    raise AssertionError("a sandbox whose time was over is gone")
except SandboxNotFoundException:
    print("timeout")
