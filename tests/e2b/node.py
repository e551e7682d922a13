"""Starts a thawd that serves E2B's API, and uses it with E2B's Python SDK, unchanged: node.py PROGRAM... Runs each PROGRAM, then what only a
real guest can show: a pause and a connect, a fork, a snapshot, a port, metrics. Prints what each step came to."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

KEY = "an-api-key-of-the-test-0123456789"
ADDRESS = "127.0.0.1:3000"
CONFIGURATION = """
[api]
tokens = "{place}/tokens"

[e2b]
listen = "{address}"

[e2b.templates.base]
image = "oci:{images}:python3"
cpus = 1
memory_mib = 256
"""


def flow():
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

    server = sandbox.commands.run("exec python3 -m http.server 8000 --directory /", background=True)
    asked = urllib.request.Request(
        f"http://{ADDRESS}/kept", headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    )
    deadline = time.time() + 60
    while True:
        try:
            assert urllib.request.urlopen(asked, timeout=30).read() == b"before"
            break
        except urllib.error.HTTPError as refused:
            # It does not listen yet.
            assert refused.code == 502 and time.time() < deadline, refused
            time.sleep(0.5)
    print("port")

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


def main():
    place = tempfile.mkdtemp(dir=os.path.dirname(os.environ.get("THAW_DATA", "")) or None)
    with open(f"{place}/tokens", "w") as tokens:
        os.chmod(f"{place}/tokens", 0o600)
        tokens.write(f"acme {KEY} role=operate tenant=acme\n")
    with open(f"{place}/thawd.toml", "w") as configuration:
        images = os.environ["THAW_TEST_IMAGES"]
        configuration.write(CONFIGURATION.format(place=place, images=images, address=ADDRESS))
    socket = f"{place}/thawd.sock"
    environment = dict(os.environ, THAW_RUN=f"{place}/run", THAW_DATA=f"{place}/data", THAW_CONFIG=f"{place}/thawd.toml")
    thawd = subprocess.Popen([f"{os.environ['THAW_BIN']}/thawd", "--socket", socket], env=environment)
    url = f"http://{ADDRESS}"
    os.environ.update(E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_API_KEY=KEY)
    try:
        while not os.path.exists(socket):
            assert thawd.poll() is None, "thawd ended"
            time.sleep(0.1)
        for program in sys.argv[1:]:
            print("program", os.path.basename(program), flush=True)
            subprocess.run([sys.executable, program], check=True)
        flow()
    finally:
        thawd.terminate()
        code = thawd.wait()
    assert code == 0, code
    print(f"{len(sys.argv)} passed, 0 failed")


if __name__ == "__main__":
    sys.exit(main())
