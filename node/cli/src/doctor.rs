//! `thaw doctor`.

use thaw_daemon::exit::DOCTOR_FOUND;
use thaw_doctor::{Host, examine, render};
use thaw_sandbox::paths::Paths;

use crate::stdio::terminal;
use crate::ui::Ui;

/// Columns where there is no terminal to ask.
const WIDTH: usize = 120;

pub(super) fn doctor(ui: &Ui, json: bool) -> u8 {
    let report = examine(&Host::this(), &Paths::from_env());
    if json {
        super::print(&serde_json::json!(report).to_string());
    } else {
        let width = terminal::size().map_or(WIDTH, |(_, columns)| columns.into());
        super::print(render(&report, width, ui.colour_stdout()).trim_end());
    }
    if report.ready { 0 } else { DOCTOR_FOUND }
}
