//! What Thaw's processes wait for, told with the failure of a command that did not end.

use std::fmt::Write;
use std::fs;

/// Every process whose name begins with `thaw`: its arguments and, for each thread, its name, state, the kernel
/// function it sleeps in and its kernel stack (`proc(5)`; the stack as root only).
pub fn report() -> String {
    let mut report = String::new();
    for pid in numbered("/proc") {
        let name = read(&format!("{pid}/comm"));
        if !name.starts_with("thaw") {
            continue;
        }
        let arguments = read(&format!("{pid}/cmdline")).replace('\0', " ");
        let _ = writeln!(report, "{pid} {name}: {arguments}");
        for thread in numbered(&format!("{pid}/task")) {
            let state = read(&format!("{thread}/stat"));
            let state = state
                .rsplit(')')
                .next()
                .and_then(|rest| rest.split_whitespace().next());
            let _ = writeln!(
                report,
                "  {} {} in {} call {}: {}",
                read(&format!("{thread}/comm")),
                state.unwrap_or("gone"),
                read(&format!("{thread}/wchan")),
                read(&format!("{thread}/syscall")),
                read(&format!("{thread}/stack")).replace('\n', " "),
            );
        }
    }
    report
}

/// The entries of a folder that are numbers, as whole paths.
fn numbered(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.parse::<u32>().is_ok())
        })
        .map(|entry| entry.path().display().to_string())
        .collect()
}

/// A file of /proc; nothing when it is gone meanwhile.
fn read(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim_end()
        .to_string()
}
