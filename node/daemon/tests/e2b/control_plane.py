"""Uses every call of the control plane with E2B's Python SDK, unchanged. Takes the address and the API key from the environment:
E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY. The sandboxes may be fakes: nothing runs in them."""

import datetime
import os
import urllib.error
import urllib.request

import e2b
from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, SandboxException, SandboxNotFoundException


def raises(expected, call, status=None):
    try:
        call()
    except expected as error:
        assert status is None or error.status_code == status, (error.status_code, error)
        return error
    raise AssertionError(f"no {expected.__name__}")


def pages(**query):
    paginator, found = Sandbox.list(**query), []
    while paginator.has_next:
        found += paginator.next_items()
    return [sandbox.sandbox_id for sandbox in found]


def status(headers):
    """What a request to a port of a sandbox gets that cannot be answered."""
    asked = urllib.request.Request(os.environ["E2B_SANDBOX_URL"], headers=headers)
    return raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(asked, timeout=30)).code


ODD = "a=b&c d+%2B/\U0001f9ca\n"

sandbox = Sandbox.create(timeout=60, metadata={"owner": "sdk", ODD: ODD}, envs={"A": "1"})
info = sandbox.get_info()
assert info.sandbox_id == sandbox.sandbox_id and info.template_id == "base" and info.name == "base", info
assert info.metadata == {"owner": "sdk", ODD: ODD}, info
assert info.state == SandboxState.RUNNING and info.cpu_count > 0 and info.memory_mb > 0, info
assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}, info
assert sandbox.get_host(3000).startswith(f"3000-{sandbox.sandbox_id}."), sandbox.get_host(3000)
assert sandbox._envd_access_token and sandbox.download_url("/x"), "it is secured"

sandbox.set_timeout(3600)
end = sandbox.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
assert datetime.timedelta(minutes=58) < end < datetime.timedelta(minutes=61), end

others = [Sandbox.create(metadata={"owner": "other"}, timeout=600) for _ in range(4)]
assert pages(query=SandboxQuery(metadata={ODD: ODD})) == [sandbox.sandbox_id]
assert sorted(pages(limit=2)) == sorted(s.sandbox_id for s in [sandbox, *others])
assert pages(order="asc") == list(reversed(pages(order="desc", limit=1)))
assert pages(query=SandboxQuery(template="nothing")) == []
later = datetime.datetime.now() + datetime.timedelta(hours=1)
assert pages(query=SandboxQuery(started_after=later)) == []

assert sandbox.pause() is True and sandbox.pause() is False
assert pages(query=SandboxQuery(state=[SandboxState.PAUSED])) == [sandbox.sandbox_id]
assert raises(SandboxException, lambda: sandbox.set_timeout(60), 409)
again = Sandbox.connect(sandbox.sandbox_id, timeout=120)
assert again._envd_access_token == sandbox._envd_access_token
assert again.get_info().state == SandboxState.RUNNING
again.connect(timeout=240)

paused = Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
assert paused.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
closed = Sandbox.create(allow_internet_access=False, network={"allow_out": ["192.0.2.0/24"]})
closed.update_network({"deny_out": ["192.0.2.7"]})
raises(SandboxException, lambda: closed.update_network({"allow_out": ["pypi.org"]}), 400)
hidden = Sandbox.create(network={"allow_public_traffic": False})
assert hidden.get_info().network["allow_public_traffic"] is False
assert Sandbox.connect(hidden.sandbox_id).traffic_access_token == hidden.traffic_access_token
assert closed.traffic_access_token is None
headers = {"E2b-Sandbox-Id": hidden.sandbox_id, "E2b-Sandbox-Port": "3000"}
assert status(headers) == 403
assert status(headers | {"e2b-traffic-access-token": hidden.traffic_access_token}) == 502, "no program listens"

snapshot = sandbox.create_snapshot(name="warm")
assert snapshot.names == ["warm"], snapshot
assert [found.snapshot_id for found in sandbox.list_snapshots().next_items()] == [snapshot.snapshot_id]
thawed = Sandbox.create(snapshot.snapshot_id, metadata={"of": "snapshot"})
assert thawed.get_info().template_id == snapshot.snapshot_id
assert Sandbox.create("warm").get_info().name == "warm"
forks = sandbox.fork(count=2)
assert len(forks) == 2 and all(isinstance(fork, Sandbox) for fork in forks), forks
assert forks[0].get_info().metadata == {"owner": "sdk", ODD: ODD}
assert len(sandbox.get_metrics()) == 1
assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False

one = Sandbox.create(idempotency_key="sdk-1").sandbox_id
assert Sandbox.create(idempotency_key="sdk-1").sandbox_id == one
raises(SandboxException, lambda: Sandbox.create("nothing"), 404)
raises(SandboxException, lambda: Sandbox.create(mcp={"x": {}}), 501)
raises(SandboxException, lambda: sandbox.pause(mode="filesystem"), 501)
raises(AuthenticationException, lambda: Sandbox.create(api_key="wrong"))
raises(SandboxNotFoundException, lambda: Sandbox.connect("0123456789ab"))
raises(SandboxNotFoundException, lambda: Sandbox.get_info("0123456789ab"))

assert sandbox.kill() is True and sandbox.kill() is False
assert sandbox.is_running() is False
for left in pages():
    assert Sandbox.kill(left) is True
assert pages() == []
print(f"e2b {e2b.__version__ if hasattr(e2b, '__version__') else ''} at {os.environ['E2B_API_URL']}: good")
