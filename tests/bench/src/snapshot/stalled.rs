//! What can be said of a server that shows no page: it is part of the error that ends the benchmark.

use std::fs;
use std::process::Command;

use thaw_tiny_node::Place;

/// What its container's processes wait for, and its sockets.
const INSIDE: &str = "cat /proc/loadavg /proc/net/tcp; grep -H -e ^Name -e ^State /proc/[0-9]*/status";
/// How long the sandbox may take to say it, seconds.
const LIMIT: &str = "60";

/// What threads its machine has, and what the sandbox says of itself.
pub fn describe(place: &Place, id: &str, vmm: i64) -> String {
    let thaw = |words: &[&str]| {
        let thaw = place.command("thaw");
        let mut limited = Command::new("timeout");
        let variables = thaw.get_envs().filter_map(|(name, value)| Some((name, value?)));
        limited
            .envs(variables)
            .arg(LIMIT)
            .arg(thaw.get_program())
            .args(words);
        match limited.output() {
            Ok(said) => format!(
                "thaw {}: {}\n{}{}",
                words[0],
                said.status,
                String::from_utf8_lossy(&said.stdout),
                String::from_utf8_lossy(&said.stderr)
            ),
            Err(e) => format!("thaw {}: {e}\n", words[0]),
        }
    };
    let logs = thaw(&["logs", id]);
    let inside = thaw(&["exec", id, "sh", "-c", INSIDE]);
    format!("its VMM:\n{}{logs}{inside}", threads(vmm))
}

/// A line for each thread of a process: its name, its state, its time so far in ticks, user's and system's, and what it waits for.
fn threads(process: i64) -> String {
    let tasks = fs::read_dir(format!("/proc/{process}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let mut text = String::new();
    for task in tasks {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (stat, waits) = (read("stat"), read("wchan"));
        // The name, in brackets, may have spaces.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let field = |n: usize| fields.get(n).copied().unwrap_or("?");
        let name = read("comm");
        text += &format!(
            "  {} {} {} {} {waits}\n",
            name.trim_end(),
            field(0),
            field(11),
            field(12)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_process_have_names_and_states() {
        let thread = std::thread::Builder::new().name("named here".into());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let run = move || {
            begin.send(()).unwrap();
            ended.recv()
        };
        let thread = thread.spawn(run).unwrap();
        // A thread gives itself its name when it begins.
        begun.recv().unwrap();
        let said = threads(std::process::id().into());
        drop(end);
        assert!(thread.join().unwrap().is_err());
        assert!(said.contains("  named here "), "{said}");
        assert_eq!(threads(-1), "");
    }
}
