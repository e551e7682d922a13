//! The command line.

fn main() -> ! {
    thaw_daemon::exit::end_on_panic();
    let status = thaw_cli::main();
    // Not a return: a thread may still be reading stdin, and it must not hold us up.
    std::process::exit(status.into())
}
