//! Invalid freezes and thaws are refused before any machine exists, each with its code, and leave nothing.

#![allow(clippy::unwrap_used)]

mod support;

use support::{HALT, Leftovers, Place, one_line, text};

#[test]
fn what_cannot_be_frozen_or_thawed_has_its_own_code() {
    let Some(place) = Place::new(HALT) else { return };
    let nowhere = place.path("nowhere").display().to_string();
    let empty = place.path("empty").display().to_string();
    std::fs::create_dir(&empty).unwrap();
    let garbled = place.path("garbled").display().to_string();
    std::fs::create_dir(&garbled).unwrap();
    for name in ["manifest.json", "manifest.b3", "state", "memory"] {
        std::fs::write(place.path("garbled").join(name), b"{}").unwrap();
    }
    for (line, code) in [
        (vec!["thaw", &nowhere], 99),
        (vec!["thaw", &empty], 99),
        (vec!["thaw", &garbled], 96),
        (vec!["thaw", "-d", &nowhere], 99),
        (vec!["thaw", "nothing"], 99),
        (vec!["snapshot", "inspect", "nothing"], 99),
        (vec!["snapshot", "rm", "nothing"], 99),
        (vec!["snapshot", "ls"], 0),
        (vec!["freeze", "nobody", &nowhere], 91),
        (vec!["pause", "nobody"], 91),
        (vec!["resume", "nobody"], 91),
        (vec!["fork", "nobody"], 91),
        (vec!["rm", "nobody"], 91),
        (vec!["fork", "-n", "0", "nobody"], 125),
        (vec!["thaw", "-d", "-i", &nowhere], 125),
        (vec!["run", "--memory-mode", "magic", "x"], 125),
    ] {
        let output = place.command("thaw").args(&line).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(code),
            "{line:?}: {}",
            text(&output.stderr)
        );
    }
    assert!(!place.path("nowhere").exists());
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn a_mode_in_the_environment_that_is_none_is_told() {
    let Some(place) = Place::new(HALT) else { return };
    let output = place.run().env("THAW_MEMORY_MODE", "magic").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        one_line(&output).contains("THAW_MEMORY_MODE=magic"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(place.leftovers(), Leftovers::none());
}
