//! Whatever form an image has and however it is served, a guest sees the same files, and fetches what it reads.

#![allow(clippy::unwrap_used)]

use std::sync::{Mutex, MutexGuard, OnceLock};

use thaw_e2e::forms::{FORMS, Forms};
use thaw_e2e::run;

/// Made once; one test at a time, since they count what is fetched and forget what was.
fn forms() -> MutexGuard<'static, Forms> {
    static MADE: OnceLock<Mutex<Forms>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let names = FORMS.map(|(name, _)| name);
        Mutex::new(Forms::new(env!("CARGO_BIN_EXE_thaw-probe"), &names))
    });
    made.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

const SERVINGS: [&str; 2] = ["virtiofs", "erofs"];

/// Says where two listings differ, rather than that they do.
fn assert_same(forms: &Forms, what: &str, form: &str, serving: &str, expected: &str) {
    let tree = forms.probe(&["--root", serving], form, &["tree", "--list", "/"]);
    if tree == expected {
        return;
    }
    let differ = |a: &str, b: &str| {
        let b: std::collections::HashSet<_> = b.lines().collect();
        let lines = a.lines().filter(|line| !b.contains(line));
        lines.take(5).collect::<Vec<_>>().join("\n  ")
    };
    panic!(
        "{what} over {serving} differs:\n  {}\nexpected:\n  {}",
        differ(&tree, expected),
        differ(expected, &tree)
    );
}

#[test]
fn every_form_shows_the_same_tree_by_both_servings() {
    let forms = forms();
    forms.home.forget_images();
    let gzip = forms.reference("gzip");
    run(&mut forms.home.thaw(&["-q", "image", "pull", "--full", &gzip])).ok();
    let expected = forms.probe(&[], "gzip", &["tree", "--list", "/"]);
    let entries = expected.lines().count();
    assert!(entries > 300, "{entries} lines");
    assert_same(&forms, "what was pulled in full", "gzip", "erofs", &expected);
    run(&mut forms.home.thaw(&["-q", "image", "prune", &gzip])).ok();
    assert_same(&forms, "what was kept of it", "gzip", "virtiofs", &expected);
    // Each form by one of them, in turn, unless all is wanted: what fills the cache files knows nothing of who reads.
    let all = std::env::var_os("THAW_ALL_FORMS").is_some();
    for (number, (form, _)) in FORMS.into_iter().enumerate().skip(1) {
        let in_turn = [SERVINGS[number % 2]];
        let servings = if all { &SERVINGS[..] } else { &in_turn };
        for serving in servings {
            forms.home.forget_images();
            assert_same(&forms, form, form, serving, &expected);
        }
    }
}

#[test]
#[ignore = "long: make e2e-images"]
fn what_can_be_read_in_pieces_is_fetched_in_pieces() {
    let forms = forms();
    let whole = forms.stored();
    for (form, pieces) in FORMS.into_iter().filter(|(_, pieces)| *pieces) {
        forms.home.forget_images();
        forms.proxy.reset();
        let out = forms.probe(&["--no-prefetch"], form, &["reads", "/known", "3", "7", "0"]);
        assert!(out.ends_with("done, 0 failed\n"), "{form}: {out}");
        let fetched = forms.proxy.counts().down;
        // The probe itself is a good part of the image; the file nobody read is more than half.
        assert!(pieces && fetched < whole / 2, "{form}: {fetched} of {whole}");
        forms.proxy.reset();
        forms.probe(&["--no-prefetch"], form, &["reads", "/known", "3", "7", "0"]);
        let again = forms.proxy.counts().down;
        assert!(again < 64 << 10, "{form}: {again} bytes for what is stored");
    }
}

#[test]
#[ignore = "long: run with --all yes"]
fn what_was_pruned_is_read_in_pieces_by_the_index_that_was_kept() {
    let forms = forms();
    let gzip = forms.reference("gzip");
    forms.home.forget_images();
    run(&mut forms.home.thaw(&["-q", "image", "pull", "--full", &gzip])).ok();
    run(&mut forms.home.thaw(&["-q", "image", "prune", &gzip])).ok();
    forms.proxy.reset();
    let out = forms.probe(&["--no-prefetch"], "gzip", &["reads", "/known", "3", "7", "0"]);
    assert!(out.ends_with("done, 0 failed\n"), "{out}");
    let (counts, log) = forms.proxy.reset();
    assert!(counts.down > 0 && counts.down < forms.stored() / 2, "{counts:?}");
    assert!(
        log.iter()
            .any(|request| request.range.is_some() && request.status == 206),
        "{log:?}"
    );
}

#[test]
#[ignore = "long: make e2e-images"]
fn what_a_run_read_is_fetched_ahead_by_the_next() {
    let forms = forms();
    let soci = forms.reference("soci");
    let prune = || run(&mut forms.home.thaw(&["-q", "image", "prune", &soci])).ok();
    let read = ["reads", "/known", "20", "11", "0"];
    forms.home.forget_images();
    forms.probe(&["--record"], "soci", &read);
    prune();
    forms.proxy.reset();
    // This one reads nothing of what was recorded, and stays long enough for it to be fetched.
    forms.probe(&[], "soci", &["reads", "/known", "1", "11", "15000"]);
    let ahead = forms.proxy.counts().down;
    prune();
    forms.proxy.reset();
    forms.probe(
        &["--no-prefetch"],
        "soci",
        &["reads", "/known", "1", "11", "15000"],
    );
    let needed = forms.proxy.counts().down;
    assert!(
        ahead > needed,
        "{ahead} bytes with reading ahead, {needed} without"
    );
    assert!(
        ahead < forms.stored() * 3 / 4,
        "{ahead}: more than what was recorded"
    );
}

#[test]
fn an_image_converted_twice_is_the_same_image() {
    let forms = forms();
    let source = forms.reference("gzip");
    let digest = |tag: &str| {
        forms.home.forget_images();
        let to = format!("{}/again:{tag}", forms.proxy.host());
        let printed = run(&mut forms.home.thaw(&["-q", "image", "convert", &source, &to])).ok();
        printed.trim().to_string()
    };
    let (first, second) = (digest("first"), digest("second"));
    assert!(first.contains("sha256:"), "{first}");
    assert_eq!(first, second);
}
