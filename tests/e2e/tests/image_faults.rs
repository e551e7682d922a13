//! A registry that fails, a store that is spoiled, a fetcher that is killed: a guest reads the right bytes or gets an
//! error in time, never wrong bytes.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{BufRead, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use thaw_e2e::forms::Forms;
use thaw_e2e::{Outcome, finish, pid_of, run, wait_for_line};
use thaw_test_registry::proxy::{Fault, On, Rule};

/// Made once; one test at a time. Nothing is stored, nothing goes wrong yet.
fn forms() -> MutexGuard<'static, Forms> {
    static MADE: OnceLock<Mutex<Forms>> = OnceLock::new();
    let made =
        MADE.get_or_init(|| Mutex::new(Forms::new(env!("CARGO_BIN_EXE_thaw-probe"), &["soci", "fixed"])));
    let forms = made.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    forms.proxy.faults(Vec::new());
    forms.home.forget_images();
    forms.proxy.reset();
    forms
}

/// `thaw run` of random reads of the known file.
fn reads(forms: &Forms, form: &str, count: u32, pause_ms: u32) -> std::process::Command {
    let (reference, count, pause) = (forms.reference(form), count.to_string(), pause_ms.to_string());
    let run = ["run", "--rm", "--network", "none", "--no-prefetch", &reference];
    let probe = ["/probe", "reads", "/known", &count, "5", &pause];
    forms.home.thaw(&[&run[..], &probe[..]].concat())
}

fn assert_all_read(what: &str, outcome: &Outcome) {
    assert!(
        outcome.status.success() && outcome.stdout.ends_with("done, 0 failed\n"),
        "{what}: {outcome:?}"
    );
}

/// Reads until a line with `text`, then gives the rest to come.
fn after_line(child: &mut Child, text: &str) -> std::thread::JoinHandle<String> {
    let mut reader = wait_for_line(child, text);
    std::thread::spawn(move || {
        let mut rest = String::new();
        let _ = reader.read_to_string(&mut rest);
        rest
    })
}

#[test]
#[ignore = "long: run with --all yes"]
fn running_image_waits_out_a_registry_outage() {
    let forms = forms();
    let mut child = reads(&forms, "soci", 60, 30).spawn().unwrap();
    let rest = after_line(&mut child, "read 5");
    forms.proxy.go_away();
    std::thread::sleep(Duration::from_secs(2));
    forms.proxy.come_back().unwrap();
    let outcome = finish(child, "");
    let rest = rest.join().unwrap();
    assert!(rest.ends_with("done, 0 failed\n"), "{rest}, {outcome:?}");
}

#[test]
#[ignore = "long: make e2e-images"]
fn one_wrong_answer_of_each_kind_is_asked_for_again() {
    let forms = forms();
    let kinds = [
        ("wrong bytes", Fault::Flip(100)),
        ("a cut", Fault::CutAfter(100)),
        (
            "unavailable",
            Fault::Answer {
                status: 503,
                headers: vec![("Retry-After".into(), "0".into())],
            },
        ),
        (
            "slow loris",
            Fault::Trickle {
                after: 1000,
                every: Duration::from_millis(500),
            },
        ),
        ("the whole blob", Fault::WholeForRange),
    ];
    for (what, fault) in kinds {
        for form in ["soci", "fixed"] {
            forms.home.forget_images();
            // Not the first, which may be for the index.
            let rule = Rule {
                skip: 2,
                ..Rule::times(On::ranges(), 1, fault.clone())
            };
            forms.proxy.faults(vec![rule]);
            let outcome = run(&mut reads(&forms, form, 20, 0));
            assert_eq!(forms.proxy.applied(), [1], "{what} of {form}: never asked");
            assert_all_read(&format!("{what} of {form}"), &outcome);
        }
    }
}

#[test]
#[ignore = "long: make e2e-images"]
fn lasting_registry_fault_is_an_error_never_wrong_bytes() {
    let forms = forms();
    for form in ["soci", "fixed"] {
        forms.home.forget_images();
        // The start itself must succeed: what is read later is wrong. The guest waits for a line before it reads.
        let reference = forms.reference(form);
        let run = ["run", "-i", "--rm", "--network=none", "--no-prefetch", &reference];
        let probe = ["/probe", "reads", "/known", "8", "5", "150", "wait"];
        let mut command = forms.home.thaw(&[&run[..], &probe[..]].concat());
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let rest = after_line(&mut child, "reading");
        forms
            .proxy
            .faults(vec![Rule::always(On::ranges(), Fault::Flip(50))]);
        let start = Instant::now();
        let outcome = finish(child, "\n");
        let rest = rest.join().unwrap();
        assert!(!rest.contains("wrong bytes"), "{form}: {rest}");
        let failed = rest.contains("Input/output error") || rest.contains("I/O error");
        assert!(failed && rest.contains("done, "), "{form}: {rest}, {outcome:?}");
        assert!(
            start.elapsed() < Duration::from_secs(200),
            "{form}: {:?}",
            start.elapsed()
        );
        assert!(
            outcome.stderr.contains("digest"),
            "{form}: no cause is named: {outcome:?}"
        );
        forms.proxy.faults(Vec::new());
    }
}

#[test]
#[ignore = "long: make e2e-images"]
fn a_token_that_expires_while_the_guest_runs_is_replaced() {
    let forms = forms();
    forms.proxy.require_tokens(6);
    let outcome = run(&mut reads(&forms, "soci", 30, 0));
    let given = forms.proxy.tokens_given();
    forms.proxy.require_tokens(usize::MAX);
    assert_all_read("with tokens", &outcome);
    assert!(given > 1, "{given} tokens");
}

#[test]
#[ignore = "long: run with --all yes"]
fn a_fetcher_killed_during_a_hundred_random_reads_loses_none() {
    let forms = forms();
    let mut first = forms.home.thawd(&[]);
    let mut child = reads(&forms, "soci", 100, 20).spawn().unwrap();
    let rest = after_line(&mut child, "read 10");
    first.kill().unwrap();
    first.wait().unwrap();
    // Long enough for reads to wait for nobody.
    std::thread::sleep(Duration::from_secs(1));
    let second = forms.home.thawd(&[]);
    let outcome = finish(child, "");
    let rest = rest.join().unwrap();
    assert!(rest.ends_with("done, 0 failed\n"), "{rest}, {outcome:?}");
    assert_eq!(rest.matches("read ").count(), 90, "{rest}");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    let mut second = second;
    assert!(second.wait().unwrap().success());
}

#[test]
#[ignore = "long: make e2e-images"]
fn two_that_fetch_the_same_at_once_both_read_it_right() {
    let forms = forms();
    let alone = {
        assert_all_read("alone", &run(&mut reads(&forms, "soci", 40, 0)));
        forms.proxy.reset().0.down
    };
    forms.home.forget_images();
    let children = [(); 2].map(|()| reads(&forms, "soci", 40, 0).spawn().unwrap());
    for child in children {
        assert_all_read("at once", &finish(child, ""));
    }
    let both = forms.proxy.counts().down;
    assert!(
        both < alone * 2 + (256 << 10),
        "{both} bytes for two, {alone} for one"
    );
}

#[test]
fn damaged_store_file_is_detected_and_fetched_again() {
    let forms = forms();
    let reference = forms.reference("soci");
    for spoil in ["flipped", "overwritten", "cut"] {
        forms.home.forget_images();
        assert_all_read("before", &run(&mut reads(&forms, "soci", 60, 0)));
        let data = forms.home.stored("data").remove(0);
        let file = File::options().read(true).write(true).open(&data).unwrap();
        let length = file.metadata().unwrap().len();
        match spoil {
            "flipped" => {
                flip_every_page(&file, length);
                let verified = run(&mut forms.home.thaw(&["-q", "image", "verify", &reference]));
                // Opening the store finds it, and no chunk counts as verified any more.
                let said = verified.stderr.contains("was changed behind the store's back");
                assert!(said, "not found: {verified:?}");
            }
            // Not looked for: the next sandbox sees that its layer's file is another than the one that was compared.
            "overwritten" => flip_every_page(&file, length),
            // Seen by whoever opens the store next: what was beyond the cut counts as never fetched.
            _ => file.set_len(length / 2).unwrap(),
        }
        let outcome = run(&mut reads(&forms, "soci", 60, 0));
        assert_all_read(spoil, &outcome);
    }
}

/// One byte of each page that is there.
fn flip_every_page(file: &File, length: u64) {
    for at in (0..length).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        // Holes stay holes: they were never fetched.
        if byte[0] != 0 {
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
    }
}

#[test]
fn a_full_disk_is_a_clear_error_and_no_corruption() {
    let forms = forms();
    let images = forms.home.images();
    fs::create_dir_all(&images).unwrap();
    let disk = SmallDisk::mount(&images);
    let full = run(&mut reads(&forms, "soci", 40, 0));
    let said = format!("{}{}", full.stdout, full.stderr);
    assert!(!said.contains("wrong bytes"), "{full:?}");
    assert!(
        !full.stdout.ends_with("done, 0 failed\n"),
        "it was not full: {full:?}"
    );
    assert!(
        said.to_lowercase().contains("disk full") || said.contains("No space left"),
        "the cause is not named: {full:?}"
    );
    disk.grow();
    let outcome = run(&mut reads(&forms, "soci", 40, 0));
    assert_all_read("with room", &outcome);
}

/// A tmpfs of 3 MiB; unmounted when dropped, also by a test that fails, for the next one makes its folder anew.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a Path) -> SmallDisk<'a> {
        mount_tmpfs(at, "size=3m");
        SmallDisk(at)
    }

    fn grow(&self) {
        mount_tmpfs(self.0, "remount,size=200m");
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

fn mount_tmpfs(at: &Path, options: &str) {
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(at)
        .output()
        .unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
}

/// Only that this file's helpers read what they say: a line that never comes ends the test with what came instead.
#[test]
fn the_probe_tells_wrong_bytes_from_right_ones() {
    let forms = forms();
    let out = forms.probe(&["--no-prefetch"], "soci", &["reads", "/unread", "3", "5", "0"]);
    assert_eq!(out.matches("FAIL").count(), 3, "{out}");
    let lines = std::io::BufReader::new(out.as_bytes()).lines().count();
    assert!(lines >= 5, "{out}");
}
