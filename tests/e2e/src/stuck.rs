//! What Thaw's processes wait for, told with the failure of what did not end.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::binary;

/// How long a guest may take to answer here, in seconds.
const GUEST_SECONDS: &str = "30";
/// Of a log, so many bytes: the last.
const LOG_BYTES: usize = 4096;

/// Every process whose name begins with `thaw`, and what the guests of process `stuck`, one of them, say is in them.
pub fn report(stuck: i32) -> String {
    let mut report = String::from("\n");
    for process in numbered("/proc") {
        if read(&format!("{process}/comm")).starts_with("thaw") {
            tell_process(&mut report, &process);
        }
    }
    tell_guests(&mut report, stuck);
    report
}

/// The same, with the guests of the thawd there is.
pub fn report_of_thawd() -> String {
    let is_thawd = |process: &String| read(&format!("{process}/comm")) == "thawd";
    let process = numbered("/proc").into_iter().find(is_thawd);
    let pid = process.and_then(|process| process.rsplit('/').next()?.parse().ok());
    report(pid.unwrap_or(0))
}

/// Its arguments, its log's end and, of each thread, name, state, and where in the kernel it sleeps (`proc(5)`; the stack as
/// root only).
fn tell_process(report: &mut String, process: &str) {
    let arguments = read(&format!("{process}/cmdline")).replace('\0', " ");
    let _ = writeln!(report, "{process}: {arguments}");
    for thread in numbered(&format!("{process}/task")) {
        let stat = read(&format!("{thread}/stat"));
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied().unwrap_or("?");
        let _ = writeln!(
            report,
            "  {} {}, ran {}+{} ticks, system call {}: {}",
            read(&format!("{thread}/comm")),
            field(3),
            field(14),
            field(15),
            read(&format!("{thread}/syscall")),
            read(&format!("{thread}/stack")).replace('\n', " "),
        );
    }
    let log = format!("{process}/fd/2");
    if fs::metadata(&log).is_ok_and(|log| log.is_file()) {
        let text = read(&log);
        let from = text.ceil_char_boundary(text.len().saturating_sub(LOG_BYTES));
        let _ = writeln!(report, "  its log: {}", &text[from..]);
    }
}

/// The sandboxes of the directories that process `stuck` was told, and the processes in them.
fn tell_guests(report: &mut String, stuck: i32) {
    let environment = read(&format!("/proc/{stuck}/environ"));
    let told: Vec<(&str, &str)> = environment
        .split('\0')
        .filter_map(|pair| pair.split_once('='))
        .filter(|(name, _)| name.starts_with("THAW_"))
        .collect();
    let thaw = |arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.arg(GUEST_SECONDS).arg(binary("thaw")).args(arguments);
        command.envs(told.iter().copied()).output()
    };
    let listed = match thaw(&["--json", "ps"]) {
        Ok(listed) => String::from_utf8_lossy(&listed.stdout).into_owned(),
        Err(e) => e.to_string(),
    };
    let _ = writeln!(report, "sandboxes: {listed}");
    let mut ids = Vec::new();
    collect_ids(&serde_json::from_str(&listed).unwrap_or_default(), &mut ids);
    for id in ids {
        let _ = writeln!(report, "{id}: {:?}", thaw(&["exec", &id, "ps"]));
    }
}

fn collect_ids(value: &Value, ids: &mut Vec<String>) {
    match value {
        Value::Array(all) => all.iter().for_each(|one| collect_ids(one, ids)),
        Value::Object(fields) => match fields.get("id").and_then(Value::as_str) {
            Some(id) => ids.push(id.into()),
            None => fields.values().for_each(|one| collect_ids(one, ids)),
        },
        _ => {}
    }
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
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim_end().to_string()
}
