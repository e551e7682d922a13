# What users of E2B's SDK do with a sandbox. Each step prints its name.
import asyncio
import io
import time

from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    TimeoutException,
)


def raises(kind, function):
    try:
        function()
    except kind as e:
        return e
    raise AssertionError(f"{kind.__name__} was not raised")


def until(is_so):
    end = time.time() + 20
    while not is_so():
        assert time.time() < end
        time.sleep(0.05)


def commands(sandbox):
    done = sandbox.commands.run("echo $A; pwd; echo err >&2", envs={"A": "1"}, cwd="/root")
    assert done.stdout.startswith("1\n") and done.stdout.endswith("/root\n"), done
    assert done.stderr == "err\n" and done.exit_code == 0 and done.error is None, done
    failed = raises(CommandExitException, lambda: sandbox.commands.run("exit 7"))
    assert failed.exit_code == 7
    long = sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert len(long.stdout) == 5_000_000
    heard = []
    sandbox.commands.run("echo a; echo b", on_stdout=heard.append)
    assert "".join(heard) == "a\nb\n"
    raises(TimeoutException, lambda: sandbox.commands.run("sleep 30", timeout=1))
    print("commands")


def background(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.stream_input(handle.pid, ["two\n", b"three\n"])
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\nthree\n"
    sleeper = sandbox.commands.run("exec sleep 60", background=True)
    assert sleeper.kill() and not sandbox.commands.kill(999_999)
    assert raises(CommandExitException, sleeper.wait).exit_code == 137
    raises(NotFoundException, lambda: sandbox.commands.connect(999_999))
    asker = sandbox.commands.run("read x; echo got $x", background=True, stdin=True)
    asker.disconnect()
    again = sandbox.commands.connect(asker.pid)
    sandbox.commands.send_stdin(asker.pid, "it\n")
    assert again.wait().stdout.endswith("got it\n")
    print("background")


def terminal(sandbox):
    pty = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(pty.pid, b"echo a$((1+1))b; exit\n")
    sandbox.pty.resize(pty.pid, PtySize(rows=30, cols=100))
    heard = []
    pty.wait(on_pty=heard.append)
    assert b"a2b" in b"".join(heard)
    print("terminal")


def files(sandbox):
    written = sandbox.files.write("dir/a.txt", "hello")
    assert (written.name, written.path) == ("a.txt", "/root/dir/a.txt"), written
    assert sandbox.files.read("dir/a.txt") == "hello"
    assert sandbox.files.read("/root/dir/a.txt", format="bytes") == b"hello"
    large = bytes(range(256)) * 20_000
    for options in [{}, {"gzip": True}, {"use_octet_stream": True}]:
        sandbox.files.write("/large", large, **options)
        assert sandbox.files.read("/large", format="bytes") == large, options
    sandbox.files.write("/large", io.BytesIO(large))
    assert b"".join(sandbox.files.read("/large", format="stream")) == large
    sandbox.files.write_files([{"path": "/m/1", "data": "1"}, {"path": "/m/2 ü", "data": b"2"}])
    assert [entry.path for entry in sandbox.files.list("/m")] == ["/m/1", "/m/2 ü"]
    raises(FileNotFoundException, lambda: sandbox.files.read("/none"))
    raises(InvalidArgumentException, lambda: sandbox.files.read("/m"))
    assert sandbox.files.make_dir("/x/y") and not sandbox.files.make_dir("/x/y")
    info = sandbox.files.rename("/m/1", "/x/z/1")
    assert (info.path, info.size, info.permissions) == ("/x/z/1", 1, "-rw-r--r--"), info
    assert len(sandbox.files.list("/x", depth=2)) == 3
    assert sandbox.files.exists("/x/z/1") and not sandbox.files.exists("/m/1")
    sandbox.files.remove("/x")
    sandbox.files.remove("/x")
    raises(FileNotFoundException, lambda: sandbox.files.get_info("/x"))
    raises(FileNotFoundException, lambda: sandbox.files.list("/x"))
    print("files")


def watches(sandbox):
    watcher = sandbox.files.watch_dir("/m", include_entry=True)
    sandbox.files.write("/m/new", "x")
    events = []
    until(lambda: events.extend(watcher.get_new_events()) or events)
    assert any(event.name.startswith("new") and event.type == FilesystemEventType.CREATE for event in events)
    watcher.stop()
    raises(FileNotFoundException, lambda: sandbox.files.watch_dir("/none"))
    print("watches")


async def asynchronous():
    sandbox = await AsyncSandbox.create()
    done = await asyncio.gather(*[sandbox.commands.run(f"echo {n}") for n in range(20)])
    assert [result.stdout for result in done] == [f"{n}\n" for n in range(20)]
    heard = asyncio.Event()
    await sandbox.files.make_dir("/m")
    watch = await sandbox.files.watch_dir("/m", lambda event: heard.set())
    await sandbox.files.write("/m/later", "x")
    await asyncio.wait_for(heard.wait(), 20)
    await watch.stop()
    print("asynchronous")


sandbox = Sandbox.create()
assert sandbox.is_running()
commands(sandbox)
background(sandbox)
terminal(sandbox)
files(sandbox)
watches(sandbox)
asyncio.run(asynchronous())
