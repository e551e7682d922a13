//! Ctrl-C, and a registry that dies, while progress is shown on a terminal of 20 columns.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use thaw_e2e::forms::Forms;
use thaw_e2e::terminal::Terminal;
use thaw_e2e::{image, run};
use thaw_test_registry::proxy::{Fault, On, Rule};

/// Whole blobs come slowly after their first half MiB.
fn slow() -> Vec<Rule> {
    let every = Duration::from_millis(200);
    let whole = On {
        range: Some(false),
        ..On::blobs()
    };
    vec![Rule::always(
        whole,
        Fault::Trickle {
            after: 512 << 10,
            every,
        },
    )]
}

/// Files and directories in the store that are not complete.
fn incomplete(images: &Path) -> String {
    let names = ["*.partial*", "*.removed*", ".tmp*", "*.new"];
    let names = names.iter().flat_map(|name| ["-o", "-name", *name]).skip(1);
    let found = Command::new("find").arg(images).args(names).output().unwrap();
    String::from_utf8(found.stdout).unwrap()
}

/// Presses Ctrl-C once `shown` is on a terminal of 20 columns. Returns the rest of what is shown.
fn interrupted(mut command: Command, shown: &str) -> String {
    let mut terminal = Terminal::sized(&mut command, 24, 20);
    // It holds the terminal open.
    drop(command);
    terminal.expect(shown);
    let began = Instant::now();
    terminal.say("\x03");
    let (status, rest) = terminal.wait();
    assert_eq!(status.code(), Some(130), "{rest}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    assert!(!rest.contains("panicked"), "{rest}");
    rest
}

#[test]
#[ignore = "long"]
fn interrupted_pull_run_and_convert_leave_nothing() {
    let forms = Forms::new(env!("CARGO_BIN_EXE_thaw-probe"), &[]);
    let (reference, images) = (forms.reference("gzip"), forms.home.images());
    let converted = format!("oci:{}", forms.home.scratch("converted").display());
    for arguments in [
        &["pull", "--full", &reference][..],
        &["run", "--rm", &reference, "/probe"],
        &["image", "convert", &reference, &converted],
    ] {
        forms.home.forget_images();
        forms.proxy.faults(slow());
        interrupted(forms.home.thaw(arguments), "%");
        assert_eq!(incomplete(&images), "", "{arguments:?}");
        assert_eq!(
            fs::read_dir(forms.home.run()).unwrap().count(),
            0,
            "{arguments:?}"
        );
    }
    // The store is as good as before.
    forms.proxy.faults(Vec::new());
    run(&mut forms.home.thaw(&["pull", "--full", &reference])).ok();
}

#[test]
fn interrupted_template_build_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = thaw_e2e::thaw(&["template", "build"]);
    command.env("THAW_DATA", folder.path().join("data"));
    command.env("THAW_RUN", folder.path().join("run"));
    interrupted(command, "a guest boots");
    let left = Command::new("find")
        .arg(folder.path().join("data/templates"))
        .args(["-type", "f"])
        .output();
    let left = String::from_utf8(left.unwrap().stdout).unwrap();
    let left: Vec<&str> = left.lines().filter(|path| !path.ends_with("lock")).collect();
    assert_eq!(left, [""; 0]);
    let machines = Command::new("pgrep")
        .args(["-f", folder.path().to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&machines.stdout), "");
}

#[test]
#[ignore = "long"]
fn registry_that_dies_during_a_pull_is_named() {
    let forms = Forms::new(env!("CARGO_BIN_EXE_thaw-probe"), &[]);
    let (reference, images) = (forms.reference("gzip"), forms.home.images());
    forms.proxy.faults(slow());
    let mut terminal = Terminal::start(&mut forms.home.thaw(&["pull", "--full", &reference]));
    terminal.expect("MiB");
    forms.proxy.go_away();
    let (status, shown) = terminal.wait();
    assert!(!status.success(), "{shown}");
    let last = shown.trim_end().lines().last().unwrap_or_default();
    assert!(
        last.contains("thaw:") && last.contains(&forms.proxy.host()),
        "{shown}"
    );
    assert_eq!(incomplete(&images), "");
    forms.proxy.come_back().unwrap();
    forms.proxy.faults(Vec::new());
    run(&mut forms.home.thaw(&["pull", "--full", &reference])).ok();
}

#[test]
fn narrow_terminal_shows_help_and_tables() {
    let busybox = image("busybox");
    for arguments in [
        &["--help"][..],
        &["run", "--help"],
        &["ps", "-a"],
        &["images"],
        &["template", "ls"],
        &["image", "inspect", &busybox],
        &["stats", "--no-stream"],
        &["doctor"],
        &["nonsense"],
    ] {
        let terminal = Terminal::sized(&mut thaw_e2e::thaw(arguments), 24, 20);
        let (status, shown) = terminal.wait();
        assert!(
            status.code().is_some() && !shown.contains("panicked"),
            "{arguments:?}: {shown}"
        );
        assert!(!shown.trim().is_empty(), "{arguments:?}");
    }
}
