"""Starts a thawd that serves E2B's API, and runs programs that use it: node.py PROGRAM... Programs in Python (.py) find the SDK by PYTHONPATH;
THAW_E2B_NODE names what runs those in JavaScript (.mjs). Each takes the address and the API key from E2B_API_URL, E2B_SANDBOX_URL and
E2B_API_KEY."""

import os
import subprocess
import sys
import tempfile
import time

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


def main():
    programs = sys.argv[1:]
    runners = {".py": sys.executable, ".mjs": os.environ["THAW_E2B_NODE"]}
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
    # Unbuffered, so that a step that hangs is the one after the last that was printed.
    os.environ.update(E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_API_KEY=KEY, PYTHONUNBUFFERED="1")
    try:
        while not os.path.exists(socket):
            assert thawd.poll() is None, "thawd ended"
            time.sleep(0.1)
        for program in programs:
            print("program", os.path.basename(program), flush=True)
            subprocess.run([runners[os.path.splitext(program)[1]], program], check=True)
    finally:
        thawd.terminate()
        code = thawd.wait()
    assert code == 0, code
    print(f"{len(programs)} passed, 0 failed")


if __name__ == "__main__":
    sys.exit(main())
