//! The command line.

fn main() -> ! {
    thaw_daemon::exit::end_on_panic();
    let status = thaw_cli::main();
    // Exits instead of returning: a thread may still read stdin, and would block the exit.
    std::process::exit(status.into())
}
