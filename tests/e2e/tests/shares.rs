//! Directories of the host in a container: every operation a program does with files, and the host's own changes.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use thaw_e2e::leftovers::Leftovers;
use thaw_e2e::{Outcome, finish, image, pid_of, run, thaw, wait_for_line};

/// How long the guest may believe what it has seen, with much to spare for an emulated machine.
const PROMPT: Duration = Duration::from_secs(30);

fn shell(volumes: &[&str], script: &str) -> Outcome {
    let busybox = image("busybox");
    let mut arguments = vec!["run", "--rm", "--network", "none"];
    for volume in volumes {
        arguments.extend(["-v", volume]);
    }
    arguments.extend([busybox.as_str(), "sh", "-c", script]);
    run(&mut thaw(&arguments))
}

fn volume(host: &Path, rest: &str) -> String {
    format!("{}:{rest}", host.display())
}

/// A container that runs a script, and its name.
fn started(name: &str, volumes: &[&str], script: &str) -> Child {
    let busybox = image("busybox");
    let mut arguments = vec!["run", "--rm", "--network", "none", "--name", name];
    for volume in volumes {
        arguments.extend(["-v", volume]);
    }
    arguments.extend([busybox.as_str(), "sh", "-c", script]);
    thaw(&arguments).stdin(Stdio::null()).spawn().unwrap()
}

fn exec(name: &str, script: &str) -> Outcome {
    run(&mut thaw(&["exec", name, "sh", "-c", script]))
}

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < PROMPT, "never: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "long: run with --all yes"]
fn files_are_read_written_renamed_and_removed() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("given"), "from the host\n").unwrap();
    let data = volume(place.path(), "/data");
    let script = "set -e; cd /data
        test \"$(cat given)\" = 'from the host'
        echo hello > made; echo more >> made; test \"$(wc -l < made)\" = 2
        mkdir -p deep/er; mv made deep/er/moved; ln deep/er/moved hard; ln -s deep/er soft
        test \"$(cat soft/moved)\" = \"$(cat hard)\"; test \"$(stat -c %h hard)\" = 2
        chown 1234:5678 hard; chmod 4750 hard; touch -d '2001-02-03 04:05:06' given
        rm given; test ! -e given
        exec 3<> open; echo kept >&3; rm open; echo still >&3; test \"$(cat /proc/self/fd/3)\" = \"$(printf 'kept\\nstill')\"
        mkfifo pipe; (echo through > pipe &); test \"$(cat pipe)\" = through
        truncate -s 1000000 sparse; test \"$(stat -c %s sparse)\" = 1000000
        df /data > /dev/null; find . | wc -l";
    shell(&[&data], script).ok();
    let hard = fs::metadata(place.path().join("hard")).unwrap();
    assert_eq!(
        (hard.uid(), hard.gid(), hard.mode() & 0o7777),
        (1234, 5678, 0o4750)
    );
    assert_eq!(
        fs::read_to_string(place.path().join("deep/er/moved")).unwrap(),
        "hello\nmore\n"
    );
    assert_eq!(
        fs::read_link(place.path().join("soft")).unwrap(),
        Path::new("deep/er")
    );
    assert!(!place.path().join("given").exists() && !place.path().join("open").exists());
}

#[test]
#[ignore = "long: run with --all yes"]
fn guest_reads_a_mebibyte_ahead_in_shares() {
    let place = tempfile::tempdir().unwrap();
    let data = volume(place.path(), "/data");
    let limits = shell(&[&data], "cat /sys/class/bdi/*/read_ahead_kb").ok();
    assert!(limits.lines().any(|kib| kib == "1024"), "{limits}");
}

#[test]
#[ignore = "long: run with --all yes"]
fn ownership_and_permissions_are_the_hosts() {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let secret = place.path().join("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let data = volume(place.path(), "/data");
    let busybox = image("busybox");
    let script = "cat /data/secret 2>/dev/null && exit 1; echo mine > /data/mine && stat -c %u:%g /data/mine";
    let said = run(&mut thaw(&[
        "run",
        "--rm",
        "--network",
        "none",
        "--user",
        "1000:2000",
        "-v",
        &data,
        &busybox,
        "sh",
        "-c",
        script,
    ]));
    assert_eq!(said.ok().trim(), "1000:2000");
    let mine = fs::metadata(place.path().join("mine")).unwrap();
    assert_eq!((mine.uid(), mine.gid()), (1000, 2000));
}

#[test]
#[ignore = "long: run with --all yes"]
fn read_only_share_refuses_writes_and_one_file_can_be_shared() {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("d")).unwrap();
    fs::write(place.path().join("d/file"), "as it was").unwrap();
    fs::write(place.path().join("single"), "alone").unwrap();
    let directory = volume(&place.path().join("d"), "/ro:ro");
    let single = volume(&place.path().join("single"), "/etc/single");
    let script = "cat /ro/file /etc/single
        for change in 'echo x > /ro/file' 'rm /ro/file' 'mkdir /ro/x' 'chmod 777 /ro/file' 'mount -o remount,rw,bind /ro'; do
          if eval \"$change\" 2>/dev/null; then echo \"it can: $change\"; fi
        done
        echo changed > /etc/single";
    let said = shell(&[&directory, &single], script);
    assert_eq!(said.stdout, "as it wasalone", "{said:?}");
    assert_eq!(
        fs::read_to_string(place.path().join("d/file")).unwrap(),
        "as it was"
    );
    assert_eq!(
        fs::read_to_string(place.path().join("single")).unwrap(),
        "changed\n"
    );
}

#[test]
#[ignore = "long: run with --all yes"]
fn what_the_host_changes_is_seen_promptly() {
    let place = tempfile::tempdir().unwrap();
    // As kubelet keeps a ConfigMap: a link to a directory that is replaced whole.
    for (version, text) in [("v1", "old"), ("v2", "new")] {
        fs::create_dir(place.path().join(version)).unwrap();
        fs::write(place.path().join(version).join("key"), text).unwrap();
    }
    symlink("v1", place.path().join("..data")).unwrap();
    symlink("..data/key", place.path().join("key")).unwrap();
    fs::write(place.path().join("plain"), "1").unwrap();
    let conf = volume(place.path(), "/conf:ro");
    let mut child = started(
        "watcher",
        &[&conf],
        "cat /conf/key /conf/plain; echo; echo up; exec sleep 1000",
    );
    let rest = wait_for_line(&mut child, "up");
    let key = || exec("watcher", "cat /conf/key").ok();
    assert_eq!(key(), "old");
    symlink("v2", place.path().join("..tmp")).unwrap();
    fs::rename(place.path().join("..tmp"), place.path().join("..data")).unwrap();
    eventually("the link is seen to lead elsewhere", || key() == "new");
    fs::write(place.path().join("plain"), "22").unwrap();
    eventually("the file is seen to have changed", || {
        exec("watcher", "cat /conf/plain").ok() == "22"
    });
    fs::write(place.path().join("added"), "").unwrap();
    eventually("the new file is seen", || {
        exec("watcher", "ls /conf").ok().contains("added")
    });
    drop(rest);
    run(&mut thaw(&["rm", "watcher"]));
    child.wait().unwrap();
}

#[test]
#[ignore = "long: run with --all yes"]
fn large_files_attributes_and_mappings_are_whole() {
    let place = tempfile::tempdir().unwrap();
    let mut file = fs::File::create(place.path().join("large")).unwrap();
    let mut block = vec![0u8; 1 << 20];
    let mut state = 1u32;
    for _ in 0..100 {
        for byte in &mut block {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        file.write_all(&block).unwrap();
    }
    drop(file);
    let data = volume(place.path(), "/data");
    let script = "set -e; cd /data; cp large copy; cmp large copy; sync
        for n in 1 2 3 4 5 6 7 8; do (for i in 1 2 3 4 5 6 7 8 9 10; do echo $n-$i >> appended; done) & done; wait
        wc -l < appended; sha256sum < copy";
    let said = shell(&[&data], script).ok();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0].trim(), "80", "appending loses nothing");
    let expected = run(std::process::Command::new("sha256sum")
        .arg(place.path().join("large"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped()))
    .ok();
    assert_eq!(lines[1].split(' ').next(), expected.split(' ').next());
    let [large, copy] = ["large", "copy"].map(|name| fs::read(place.path().join(name)).unwrap());
    assert!(large == copy);
}

/// The thaw-shares of this host.
fn serving() -> Vec<i32> {
    let processes = Leftovers::now().processes;
    let pid = |process: String| {
        process
            .strip_suffix(" thaw-share")
            .map(|pid| pid.parse().unwrap())
    };
    processes.into_iter().filter_map(pid).collect()
}

/// Kills the only thaw-share, and waits for another; none where none comes.
fn kill_share() -> Option<i32> {
    let [share] = serving()[..] else {
        panic!("one thaw-share: {:?}", serving())
    };
    rustix::process::kill_process(pid_of(share), Signal::KILL).unwrap();
    let since = Instant::now();
    while since.elapsed() < PROMPT {
        if let [other] = serving()[..]
            && other != share
        {
            return Some(other);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    None
}

#[test]
#[ignore = "long: run with --all yes"]
fn a_share_that_dies_is_started_again_and_its_files_are_there() {
    let busybox = image("busybox");
    run(&mut thaw(&["run", "--rm", &busybox, "true"])).ok();
    let before = Leftovers::now();
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let (outer, inner) = (place.path().join("outer"), place.path().join("inner"));
    // The second volume is mounted within the first.
    fs::create_dir_all(outer.join("within")).unwrap();
    fs::create_dir_all(outer.join("deep/er")).unwrap();
    fs::create_dir(&inner).unwrap();
    let volumes = [volume(&outer, "/data"), volume(&inner, "/data/within")];
    let mut child = started(
        "written",
        &[&volumes[0], &volumes[1]],
        "echo before > /data/file; cd /data/deep/er; exec 3>> /data/log; echo up
         while echo line >&3; do :; done 2> /dev/null
         until echo relative > here; do sleep 1; done 2> /dev/null
         echo goes on > /data/told; while :; do sleep 1; done",
    );
    let rest = wait_for_line(&mut child, "up");
    eventually("lines are written", || {
        fs::metadata(outer.join("log")).is_ok_and(|log| log.len() > 1000)
    });
    kill_share().expect("another thaw-share");
    // The writer's open file is gone, and nothing else: not its working directory either.
    eventually("the writer is told, and opens files again", || {
        outer.join("told").exists()
    });
    assert_eq!(
        fs::read_to_string(outer.join("deep/er/here")).unwrap(),
        "relative\n"
    );
    let log = fs::read_to_string(outer.join("log")).unwrap();
    assert!(log.lines().all(|line| line == "line"), "no line was torn");
    for round in ["one", "two"] {
        let said = exec(
            "written",
            &format!(
                "cat /data/file; ls /data; echo {round} > /data/within/{round}; echo {round} > /data/{round}"
            ),
        );
        let said = said.ok();
        for there in ["before", "deep", "log", "told", "within"] {
            assert!(said.contains(there), "{there}: {said:?}");
        }
        // What is mounted within it is still mounted.
        assert_eq!(
            fs::read_to_string(inner.join(round)).unwrap(),
            format!("{round}\n")
        );
        assert_eq!(
            fs::read_to_string(outer.join(round)).unwrap(),
            format!("{round}\n")
        );
        assert_eq!(fs::read_dir(outer.join("within")).unwrap().count(), 0);
        if round == "one" {
            kill_share().expect("a third thaw-share");
        }
    }
    run(&mut thaw(&["rm", "written"]));
    drop(rest);
    let outcome = finish(child, "");
    assert!(
        outcome.stderr.contains("another thaw-share serves"),
        "{outcome:?}"
    );
    Leftovers::settle(&before);
}

#[test]
#[ignore = "long: run with --all yes"]
fn a_share_that_dies_again_and_again_is_an_error_and_not_a_hang() {
    let busybox = image("busybox");
    run(&mut thaw(&["run", "--rm", &busybox, "true"])).ok();
    let before = Leftovers::now();
    let place = tempfile::Builder::new()
        .prefix("shared")
        .tempdir_in("/var/tmp")
        .unwrap();
    fs::write(place.path().join("file"), "x").unwrap();
    let data = volume(place.path(), "/data");
    let mut child = started(
        "orphan",
        &[&data],
        "cat /data/file; echo up; while :; do sleep 1; done",
    );
    let rest = wait_for_line(&mut child, "up");
    // Not frozen, and not forked.
    let frozen = place.path().join("frozen");
    let refused = run(&mut thaw(&["freeze", "orphan", frozen.to_str().unwrap()]));
    assert_eq!(refused.code(), 108, "{refused:?}");
    assert!(refused.stderr.contains("shares files"), "{refused:?}");
    assert_eq!(run(&mut thaw(&["fork", "orphan"])).code(), 108);

    let mut restarts = 0;
    while kill_share().is_some() {
        restarts += 1;
        assert!(restarts < 10, "it is started for ever");
    }
    assert_eq!(restarts, 5);
    eventually("the guest gets errors", || {
        let said = exec("orphan", "cat /data/other 2>&1; ls /data 2>&1; exit 0").ok();
        said.contains("I/O error") || said.contains("Input/output error")
    });
    run(&mut thaw(&["rm", "orphan"]));
    drop(rest);
    let outcome = finish(child, "");
    assert!(
        outcome.stderr.contains("thaw-share has ended for good"),
        "{outcome:?}"
    );
    Leftovers::settle(&before);
}

#[test]
#[ignore = "long: run with --all yes"]
fn what_cannot_be_shared_is_told_before_anything_runs() {
    let busybox = image("busybox");
    for (volume, code) in [
        ("/no/such/path:/data", 109),
        ("/tmp:relative", 2),
        ("named:/data", 2),
    ] {
        let said = run(&mut thaw(&["run", "--rm", "-v", volume, &busybox, "true"]));
        match code {
            109 => assert_eq!(said.code(), 109, "{said:?}"),
            _ => assert!(
                !said.status.success() && said.stderr.contains("volume"),
                "{said:?}"
            ),
        }
    }
}
