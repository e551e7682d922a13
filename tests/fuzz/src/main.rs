//! libFuzzer around one target, which `THAW_FUZZ_TARGET` names; without it, prints their names. `tests/fuzz/run` runs it.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod driver {
    use std::sync::OnceLock;

    use libfuzzer_sys::fuzz_target;
    use thaw_fuzz::{TARGETS, Target};

    static TARGET: OnceLock<Target> = OnceLock::new();

    fn choose() -> Target {
        let Ok(name) = std::env::var("THAW_FUZZ_TARGET") else {
            TARGETS.iter().for_each(|(name, _)| println!("{name}"));
            std::process::exit(0);
        };
        match TARGETS.iter().find(|(known, _)| *known == name) {
            Some((_, target)) => *target,
            None => {
                eprintln!("there is no fuzz target {name}");
                std::process::exit(2);
            }
        }
    }

    fuzz_target!(
        init: {
            TARGET.get_or_init(choose);
        },
        |input: &[u8]| TARGET.get_or_init(choose)(input)
    );
}

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("this build is not instrumented: run tests/fuzz/run");
    std::process::exit(2);
}
