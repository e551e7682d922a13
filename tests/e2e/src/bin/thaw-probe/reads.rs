//! Random reads of a file whose every byte is known, one line each: `read N`, or `FAIL` and why.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use thaw_e2e::probe::pattern;

/// Bytes of one read.
const LENGTH: usize = 4096;

/// Reads `count` pages in an order that `seed` decides, `pause` apart, each compared. A failed read is said and counted. If it
/// `waits`, it begins when its standard input has a line.
pub fn random(path: &str, count: u64, seed: u64, pause: Duration, waits: bool) {
    let file = File::open(path).unwrap();
    let pages = file.metadata().unwrap().len() / LENGTH as u64;
    let mut state = seed | 1;
    let mut failed = 0;
    println!("reading");
    if waits {
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
    for number in 1..=count {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let page = state.wrapping_mul(0x2545_f491_4f6c_dd1d) % pages;
        let mut bytes = [0; LENGTH];
        match file.read_exact_at(&mut bytes, page * LENGTH as u64) {
            Ok(()) => {
                let start = page as usize * LENGTH;
                let right = bytes.iter().enumerate().all(|(i, b)| *b == pattern(start + i));
                match right {
                    true => println!("read {number}"),
                    false => {
                        println!("FAIL {number}: wrong bytes in page {page}");
                        failed += 1;
                    }
                }
            }
            Err(e) => {
                println!("FAIL {number}: {e}");
                failed += 1;
            }
        }
        std::thread::sleep(pause);
    }
    println!("done, {failed} failed");
}
