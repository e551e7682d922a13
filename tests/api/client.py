"""create, exec, logs, files, fork, delete: by a client that was generated from the OpenAPI document and knows nothing else
of thawd. Starts a thawd of its own, and prints what each step came to."""

import os
import subprocess
import sys
import tempfile
import time

import httpx
from thawd import Client
from thawd.api.node import get_health
from thawd.api.processes import exec_in_container, get_container_logs
from thawd.api.sandboxes import create_sandbox, delete_sandbox, fork_sandbox, list_sandboxes
from thawd.models import CreateSandbox, ExecProcess, ForkSandbox, StartContainer

PATIENCE = 300


def checked(answer, status):
    assert answer.status_code == status, f"{answer.status_code}: {answer.content.decode(errors='replace')}"
    return answer.parsed


def flow(client):
    container = StartContainer(command=["sh", "-c", "echo begun; exec sleep 1000"])
    image = f"oci:{os.environ['THAW_TEST_IMAGES']}:busybox"
    asked = CreateSandbox(image=image, cpus=1, memory_mib=128, name="first", container=container)
    made = checked(create_sandbox.sync_detailed(client=client, body=asked, idempotency_key="once"), 201)
    again = checked(create_sandbox.sync_detailed(client=client, body=asked, idempotency_key="once"), 201)
    assert made.sandbox.id == again.sandbox.id
    print("created", made.sandbox.id, made.sandbox.state)

    said = checked(exec_in_container.sync_detailed("first", client=client, body=ExecProcess(command=["sh", "-c", "echo out; echo err >&2; exit 3"])), 200)
    assert (said.stdout, said.stderr, said.exit_code) == ("out\n", "err\n", 3), said
    print("exec", said.exit_code)
    assert get_container_logs.sync_detailed("first", client=client).content.decode().count("begun") == 1

    write = ExecProcess(command=["sh", "-c", "echo $$ >/tmp/mark; cat /tmp/mark"])
    mark = checked(exec_in_container.sync_detailed("first", client=client, body=write), 200).stdout
    forked = checked(fork_sandbox.sync_detailed("first", client=client, body=ForkSandbox(count=2)), 201)
    clones = [clone.sandbox.id for clone in forked.items]
    assert len(set(clones)) == 2 and made.sandbox.id not in clones
    for clone in clones:
        read = checked(exec_in_container.sync_detailed(clone, client=client, body=ExecProcess(command=["cat", "/tmp/mark"])), 200)
        assert read.stdout == mark, read
    print("forked", *clones)

    everything = {sandbox.id for sandbox in checked(list_sandboxes.sync_detailed(client=client), 200).items}
    assert everything == {made.sandbox.id, *clones}, everything
    for sandbox in everything:
        checked(delete_sandbox.sync_detailed(sandbox, client=client), 204)
    assert checked(list_sandboxes.sync_detailed(client=client), 200).items == []
    print("deleted", len(everything))


def main():
    place = tempfile.mkdtemp(dir=os.path.dirname(os.environ.get("THAW_DATA", "")) or None)
    socket = f"{place}/thawd.sock"
    environment = dict(os.environ, THAW_RUN=f"{place}/run", THAW_DATA=f"{place}/data")
    thawd = subprocess.Popen([f"{os.environ['THAW_BIN']}/thawd", "--socket", socket], env=environment)
    try:
        while not os.path.exists(socket):
            assert thawd.poll() is None, "thawd ended"
            time.sleep(0.1)
        transport = httpx.HTTPTransport(uds=socket)
        client = Client(base_url="http://thawd", timeout=httpx.Timeout(PATIENCE), httpx_args={"transport": transport})
        print("thawd", checked(get_health.sync_detailed(client=client), 200).version)
        flow(client)
    finally:
        thawd.terminate()
        code = thawd.wait()
    assert code == 0, code
    print("1 passed, 0 failed")


if __name__ == "__main__":
    sys.exit(main())
