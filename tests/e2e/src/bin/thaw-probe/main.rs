//! What runs inside a guest under test: it says who it is, or keeps doing things a freeze could break.
//!
//! `identity` prints one line of JSON: all that no two clones may share. `survive FILE` checks itself ten times a second
//! and prints a line each time, for ever, or `FAIL` and what broke. `cat FILE` prints a file: the image has nothing else.
//! `tree DIR` hashes every file and its metadata, `tree --list DIR` says what was hashed. `reads FILE COUNT SEED MS [wait]`
//! reads random pages of a file whose bytes are known.

#![allow(clippy::unwrap_used)]

mod identity;
mod initial_sequence;
mod reads;
mod survive;
mod tree;

fn main() {
    // First of all: what a program gets whose first act is to ask for randomness.
    let first = identity::random();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["identity"] => println!("{}", identity::all(&first)),
        ["survive", file] => survive::forever(file),
        ["cat", file] => print!("{}", std::fs::read_to_string(file).unwrap()),
        ["tree", top] => tree::print(top, false),
        ["tree", "--list", top] => tree::print(top, true),
        ["reads", file, count, seed, ms, ref waits @ ..] if matches!(waits, [] | ["wait"]) => {
            let pause = std::time::Duration::from_millis(ms.parse().unwrap());
            let waits = !waits.is_empty();
            reads::random(file, count.parse().unwrap(), seed.parse().unwrap(), pause, waits);
        }
        _ => {
            eprintln!(
                "usage: thaw-probe identity | survive FILE | cat FILE | tree [--list] DIR | reads FILE COUNT SEED MS [wait]"
            );
            std::process::exit(2);
        }
    }
}
