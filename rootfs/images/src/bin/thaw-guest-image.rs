//! `thaw-guest-image AGENT OUT` makes the guest image OUT with the program AGENT as `/sbin/init`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [agent, out] = &arguments[..] else {
        eprintln!("usage: thaw-guest-image AGENT OUT");
        return ExitCode::from(2);
    };
    match thaw_images::guest_image::build(Path::new(agent), Path::new(out)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("thaw-guest-image: {error}");
            ExitCode::FAILURE
        }
    }
}
