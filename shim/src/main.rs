//! `containerd-shim-thaw-v2`, the runtime `io.containerd.thaw.v2`.

use std::process::ExitCode;

use thaw_shim::arguments::{Action, Arguments};
use thaw_shim::error::Result;
use thaw_shim::{delete, info, runtime_info, serve, start};
use thaw_sys::allocator;

fn main() -> ExitCode {
    // There is one of it for each pod.
    allocator::limit_heaps(1);
    allocator::trim_above(64 << 10);
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // containerd shows the output of `start` and `delete`.
            eprintln!("io.containerd.thaw.v2: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    match arguments.action {
        Action::Start => start::run(&arguments),
        Action::Delete => delete::run(&arguments),
        Action::Serve => serve::run(&arguments).inspect_err(|e| info!("{e}")),
        Action::Version => {
            println!("containerd-shim-thaw-v2 {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Action::Info => runtime_info::print(),
    }
}
