"""Times requests to a node with E2B's Python SDK, unchanged, and with the standard library: driver.py E2B API DOMAIN SERVER. E2B and API are the
addresses (HOST:PORT) of both APIs, DOMAIN is that of the sandboxes' host names, SERVER the program that runs in the sandbox.

bench-service-linux starts it. Each line of stdin is a request, {"do": NAME, ...}, and is answered by a line of JSON on stdout. Times are in ms and
include what the interpreter does from the call to the parsed answer. Every answer is checked after its time was taken: one that is not as it
must be ends the program.

Before each time that is taken of a control plane, an untimed request makes sure that the connection is open: thawd closes those that are idle.
"""

import http.client
import json
import os
import sys
import time

from e2b import Sandbox

E2B, API = (address.rsplit(":", 1) for address in sys.argv[1:3])
DOMAIN, SERVER = sys.argv[3:5]
KEY = os.environ["E2B_API_KEY"]
TEMPLATE = "base"
PORT = 8000
SMALL = b"small\n"
# Seconds; far longer than anything here takes, also on an emulated processor, where the first creation makes a template.
PATIENCE = 900
SANDBOX_S = 43_200


def ms_since(began):
    return (time.monotonic_ns() - began) / 1e6


class Connection:
    """A connection that is opened at once, and fails when it would have to be opened again."""

    def __init__(self, address, headers):
        self.http = http.client.HTTPConnection(address[0], int(address[1]), timeout=PATIENCE)
        self.http.connect()
        self.socket, self.headers = self.http.sock, headers

    def begin(self, method, path, body=None, headers=None):
        """Sends a request, and returns the answer whose body is still to be read."""
        self.http.request(method, path, body, {**self.headers, **(headers or {})})
        return self.http.getresponse()

    def ask(self, method, path, body=None, headers=None):
        """The status and the body of an answer."""
        answer = self.begin(method, path, body, headers)
        read = answer.read()
        assert self.http.sock is self.socket, f"{method} {path}: {answer.status}; the connection is closed: {read[:500]}"
        return answer.status, read

    def json(self, expected, method, path, body=None, headers=None):
        """The JSON of an answer with this status."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        status, read = self.ask(method, path, None if body is None else json.dumps(body), headers)
        assert status == expected, f"{method} {path}: {status} {read[:500]}"
        return json.loads(read)


def open_api():
    """A connection to thawd's own API on which a request was answered."""
    api = Connection(API, {"Authorization": f"Bearer {KEY}"})
    api.json(200, "GET", "/v1/health")
    return api


def create_sdk():
    Sandbox.list(limit=1, request_timeout=PATIENCE).next_items()
    began = time.monotonic_ns()
    # A creation that is repeated is a failure, not a slow one.
    sandbox = Sandbox.create(TEMPLATE, timeout=SANDBOX_S, retries=0, request_timeout=PATIENCE)
    ms = ms_since(began)
    assert sandbox.is_running()
    return {"ms": ms, "id": sandbox.sandbox_id}


def create_api(body):
    api = open_api()
    began = time.monotonic_ns()
    made = api.json(201, "POST", "/v1/sandboxes", body)
    ms = ms_since(began)
    assert made["sandbox"]["state"] == "running", made
    return {"ms": ms, "id": made["sandbox"]["id"]}


class Served:
    """A sandbox in which the server runs, and the connections to it."""

    def __init__(self):
        pauses = {"on_timeout": "pause", "auto_resume": True}
        # The time limit holds for all requests by this object.
        self.sandbox = Sandbox.create(TEMPLATE, timeout=SANDBOX_S, lifecycle=pauses, retries=0, request_timeout=PATIENCE)
        self.id = self.sandbox.sandbox_id
        self.path = f"/v1/sandboxes/{self.id}"
        self.host = {"Host": f"{PORT}-{self.id}.{DOMAIN}"}
        self.open, self.relay = {}, None
        with open(SERVER) as server:
            self.sandbox.files.write("/server.py", server.read())
        # It outlives the request, so no stream of its output is open while something is timed.
        open_api().json(201, "POST", f"{self.path}/exec", {"command": ["python3", "/server.py"], "keep": True})
        self.wait()

    def shown(self):
        return open_api().json(200, "GET", self.path)

    def address(self):
        return self.shown()["network"]["address"]

    def wait(self):
        """Waits until the server answers."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.connect("direct")
            except OSError:
                # It does not listen yet.
                assert time.monotonic() < deadline, "the server in the sandbox never answers"
                time.sleep(0.2)

    def connect(self, way):
        """A connection on which a small request was answered."""
        if way == "gateway":
            connection = Connection(E2B, self.host)
        elif way == "relay":
            connection = Connection(self.relay.rsplit(":", 1), {})
        else:
            connection = Connection((self.address(), PORT), {})
        assert connection.ask("GET", "/small") == (200, SMALL)
        return connection

    def command_sdk(self):
        assert self.sandbox.is_running()
        began = time.monotonic_ns()
        done = self.sandbox.commands.run("true", timeout=PATIENCE)
        ms = ms_since(began)
        assert (done.exit_code, done.stdout) == (0, ""), done
        return {"ms": ms}

    def command_api(self):
        api = open_api()
        # What the SDK has the sandbox run.
        command = {"command": ["/bin/bash", "-l", "-c", "true"]}
        began = time.monotonic_ns()
        done = api.json(200, "POST", f"{self.path}/exec", command)
        ms = ms_since(began)
        assert (done["exit_code"], done["stdout"]) == (0, ""), done
        return {"ms": ms}

    def use_relay(self, address):
        self.relay = address
        return {}

    def connect_all(self):
        # The relay serves one connection at a time.
        self.open = {way: self.connect(way) for way in ("gateway", "direct", "relay")}
        return {}

    def disconnect_all(self):
        for connection in self.open.values():
            connection.http.close()
        return {}

    def small(self, way):
        began = time.monotonic_ns()
        answer = self.open[way].ask("GET", "/small")
        ms = ms_since(began)
        assert answer == (200, SMALL), answer
        return {"ms": ms}

    def download(self, way, count):
        connection, piece = self.connect(way), memoryview(bytearray(1 << 20))
        read, last = 0, None
        began = time.monotonic_ns()
        answer = connection.begin("GET", f"/bytes/{count}")
        while got := answer.readinto(piece):
            read, last = read + got, piece[got - 1]
        ms = ms_since(began)
        assert (answer.status, read, last) == (200, count, ord("f")), (answer.status, read, last)
        connection.http.close()
        return {"ms": ms}

    def pause(self):
        assert self.sandbox.pause(), "it was paused already"
        return {}

    def resume(self, explicitly):
        """From a new connection to the answer of the server in a paused sandbox: to a request that resumes it, or to a request after the
        answer to a resume on the same connection."""
        paused = self.shown()
        assert (paused["state"], paused.get("memory_released")) == ("paused", True), paused
        began = time.monotonic_ns()
        gateway = Connection(E2B, {})
        if explicitly:
            gateway.json(201, "POST", f"/sandboxes/{self.id}/resume", {"timeout": SANDBOX_S}, {"X-API-Key": KEY})
        answer = gateway.ask("GET", "/small", headers=self.host)
        ms = ms_since(began)
        assert answer == (200, SMALL), answer
        assert self.shown()["state"] == "running"
        return {"ms": ms}

    def kill(self):
        assert self.sandbox.kill(), "it was gone already"
        return {}


def main():
    operations = {"create_sdk": create_sdk, "create_api": create_api}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        if name == "serve":
            served = Served()
            of_served = (
                "command_sdk", "command_api", "use_relay", "connect_all", "disconnect_all", "small", "download", "pause", "resume", "kill",
            )
            operations |= {operation: getattr(served, operation) for operation in of_served}
            answer = {"address": f"{served.address()}:{PORT}"}
        else:
            answer = operations[name](**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
