//! The command line.

fn main() -> ! {
    let status = thaw_node::cli::main();
    // Not a return: a thread may still be reading stdin, and it must not hold us up.
    std::process::exit(status.into())
}
