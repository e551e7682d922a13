"""Builds templates with E2B's Python SDK, unchanged, and makes sandboxes of them. Takes the address and the API key from the environment, as
control_plane.py does. The guest needs a shell and coreutils; all files are made below one directory of /tmp."""

import os
import shutil
import tempfile
import uuid

from e2b import Sandbox, Template, wait_for_file
from e2b.exceptions import BuildException, SandboxException, TemplateException

# In the guest. Guests of the tests over fakes share the host's files.
PLACE = f"/tmp/e2b-templates-{uuid.uuid4().hex}"


def raises(expected, call):
    try:
        call()
    except expected as error:
        return error
    raise AssertionError(f"no {expected.__name__}")


def template(context=None):
    return Template(file_context_path=context).from_template("base")


context = tempfile.mkdtemp()
os.makedirs(f"{context}/app/lib")
for name, text in [("app/main.txt", "main"), ("app/lib/part.txt", "part"), ("notes.txt", "notes")]:
    with open(f"{context}/{name}", "w") as file:
        file.write(text)

built = (
    template(context)
    .set_envs({"COLOUR": "blue", "BOTH": "$COLOUR and green"})
    .set_workdir(f"{PLACE}/work")
    .copy("app", f"{PLACE}/app")
    .copy("notes.txt", f"{PLACE}/renamed.txt", mode=0o640)
    .run_cmd(["echo $BOTH > said", "pwd"])
    .run_cmd("id -un", user="root")
    .set_start_cmd(f"touch {PLACE}/begun; exec sleep 30", wait_for_file(f"{PLACE}/begun"))
)
log = []
info = Template.build(built, "sdk:v1", tags=["stable"], min_free_disk_mb=64, on_build_logs=lambda entry: log.append(entry.message))
assert info.name == "sdk:v1" and sorted(info.tags) == ["stable", "v1"], info
assert f"{PLACE}/work" in log and "root" in log, log
status = Template.get_build_status(info)
assert status.status == "ready" and len(status.log_entries) > 0 and status.reason is None, status
print("built", info.template_id)

sandbox = Sandbox.create("sdk:v1", timeout=300)
assert sandbox.get_info().template_id == info.template_id
said = sandbox.commands.run("pwd; cat said; echo $COLOUR")
assert said.stdout == f"{PLACE}/work\nblue and green\nblue\n", said
assert sandbox.commands.run(f"cat {PLACE}/app/main.txt {PLACE}/app/lib/part.txt {PLACE}/renamed.txt").stdout == "mainpartnotes"
assert sandbox.commands.run("echo $COLOUR", envs={"COLOUR": "red"}).stdout == "red\n"
sandbox.kill()
print("created")

# A name without a tag means `default`, which no build has yet.
raises(SandboxException, lambda: Sandbox.create("sdk"))
assert Template.exists("sdk") and not Template.exists("nothing")
assert {tag.tag for tag in Template.get_tags("sdk")} == {"stable", "v1"}
assigned = Template.assign_tags("sdk:v1", ["default", "production"])
assert assigned.build_id == info.build_id and sorted(assigned.tags) == ["default", "production"], assigned
Sandbox.create("sdk", timeout=60).kill()
Template.remove_tags("sdk", "production")
assert {tag.tag for tag in Template.get_tags("sdk")} == {"stable", "v1", "default"}
raises(TemplateException, lambda: Template.remove_tags("sdk", "production"))
print("tagged")

# On top of it.
above = Template().from_template("sdk").run_cmd("test -f said && echo $BOTH")
log = []
Template.build(above, "sdk-above", on_build_logs=lambda entry: log.append(entry.message))
assert "blue and green" in log, log

failing = template().run_cmd("true").run_cmd("echo the reason >&2; exit 3")
background = Template.build_in_background(failing, "sdk-fails")
error = raises(BuildException, lambda: Template.build(failing, "sdk-fails"))
assert "the reason" in str(error) and "3" in str(error), error
while Template.get_build_status(background).status in ("waiting", "building"):
    pass
status = Template.get_build_status(background)
assert status.status == "error" and status.reason.step == "2", status
assert any("the reason" in entry.message for entry in status.reason.log_entries), status
raises(SandboxException, lambda: Sandbox.create("sdk-fails"))
print("failed as it should")

# In E2B's API a template is deleted as a snapshot is.
for name in ["sdk", "sdk-above", "sdk-fails"]:
    assert Sandbox.delete_snapshot(name) is True
    assert not Template.exists(name)
shutil.rmtree(context)
shutil.rmtree(PLACE, ignore_errors=True)
assert Sandbox.delete_snapshot("sdk") is False
print("templates: good")
