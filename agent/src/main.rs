//! `/sbin/init` of the guest image. `thaw-agent --unix DIR` serves the sockets `DIR/1023` and `DIR/1024`
//! instead of vsock, for tests that run the agent as PID 1 of new namespaces.

use thaw_agent::boot;
use thaw_agent::listener::Transport;

fn main() {
    let started = thaw_agent::clock::boottime_ns();
    let mut args = std::env::args_os().skip(1).peekable();
    if args.peek().is_some_and(|first| first == thaw_agent::warm::EXIT) {
        return;
    }
    let transport = match (args.next(), args.next()) {
        (Some(flag), Some(dir)) if flag == "--unix" => Transport::Unix(dir.into()),
        // The kernel passes to init the words of its command line that it does not know.
        _ => Transport::Vsock,
    };
    if std::process::id() != 1 {
        eprintln!("thaw-agent is the init of a Thaw guest: it must be PID 1");
        std::process::exit(2);
    }
    boot::run(started, transport)
}
