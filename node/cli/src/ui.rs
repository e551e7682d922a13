//! The output of a command on stderr: progress, errors, the table of timings. stdout is for the container.
//!
//! On a terminal, progress lines are redrawn; elsewhere they are plain lines; with `-q` only errors are shown; with `--json` each line is
//! an object. Colour is used on a terminal only, and never if NO_COLOR is set.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use thaw_daemon::exit::{exit, line};
use thaw_imagefs::digest::Digest;
use thaw_images::progress::{Event, Progress};
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::trace::Account;
use thaw_sys::lock::Lock;

use crate::stdio::terminal;
use crate::timings::timing_table;

/// Columns of a bar with its numbers. On a narrower terminal a bar is a percentage, so that it takes one line.
const BAR_COLUMNS: u16 = 72;

/// The output mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Redrawn lines, colour if wanted.
    Terminal {
        colour: bool,
    },
    Plain,
    Quiet,
    Json,
}

/// The output of one command. Clones share it.
#[derive(Clone, Debug)]
pub struct Ui {
    mode: Mode,
}

impl Ui {
    /// Chooses the mode by the flags and by whether stderr is a terminal.
    pub fn new(json: bool, quiet: bool) -> Ui {
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let mode = match (json, quiet, std::io::stderr().is_terminal()) {
            (true, _, _) => Mode::Json,
            (_, true, _) => Mode::Quiet,
            (_, _, true) => Mode::Terminal { colour: !no_colour },
            _ => Mode::Plain,
        };
        Ui { mode }
    }

    /// The output mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether stdout may be coloured.
    pub fn colour_stdout(&self) -> bool {
        matches!(self.mode, Mode::Terminal { colour: true }) && std::io::stdout().is_terminal()
    }

    /// Shows an error in one line, after the lines of its context.
    pub fn failure(&self, failure: &Error) {
        match self.mode {
            Mode::Json => write_line(
                &json!({"error": {
                    "code": failure.kind.slug(),
                    "exit": exit(failure.kind).number,
                    "message": line(failure),
                    "context": failure.context,
                }})
                .to_string(),
            ),
            mode => {
                let (dim, red, end) = match mode {
                    Mode::Terminal { colour: true } => ("\x1b[2m", "\x1b[31m", "\x1b[0m"),
                    _ => ("", "", ""),
                };
                for line in &failure.context {
                    write_line(&format!("{dim}  | {line}{end}"));
                }
                write_line(&format!("{red}thaw:{end} {}", line(failure)));
            }
        }
    }

    /// Shows a remark as one line.
    pub fn note(&self, event: &str, text: &str) {
        match self.mode {
            Mode::Quiet => {}
            Mode::Json => write_line(&json!({"event": event, "message": text}).to_string()),
            _ => write_line(&format!("thaw: {text}")),
        }
    }

    /// A fact for programs: shown in JSON mode only.
    pub fn fact(&self, fact: serde_json::Value) {
        if self.mode == Mode::Json {
            write_line(&fact.to_string());
        }
    }

    /// Shows how long each step took.
    pub fn timings(&self, account: &Account) {
        match self.mode {
            Mode::Json => write_line(
                &json!({
                    "event": "timings",
                    "stages": account.stages,
                    "reasons": account.reasons,
                    "counts": account.counts,
                    "notes": account.notes,
                })
                .to_string(),
            ),
            _ => {
                write_line(timing_table(&account.stages).trim_end());
                for (stage, note) in &account.notes {
                    write_line(&format!("{stage}: {note}"));
                }
                for reason in &account.reasons {
                    write_line(&format!("slower: {}", reason.text));
                }
            }
        }
    }

    /// The progress of a pull. Finished when dropped.
    pub fn pull(&self) -> Arc<PullProgress> {
        let target = match self.mode {
            Mode::Terminal { .. } => ProgressDrawTarget::stderr(),
            _ => ProgressDrawTarget::hidden(),
        };
        Arc::new(PullProgress {
            mode: self.mode,
            bars: MultiProgress::with_draw_target(target),
            layers: Mutex::new(HashMap::new()),
            whole: Mutex::new(None),
            began: Instant::now(),
        })
    }
}

/// Writes one line to stderr. A closed stderr is no error.
fn write_line(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// The progress of a pull.
#[derive(Debug)]
pub struct PullProgress {
    mode: Mode,
    bars: MultiProgress,
    layers: Mutex<HashMap<Digest, Layer>>,
    whole: Mutex<Option<ProgressBar>>,
    began: Instant,
}

#[derive(Debug)]
struct Layer {
    bar: ProgressBar,
    received: u64,
}

impl Progress for PullProgress {
    fn event(&self, event: Event) {
        match self.mode {
            Mode::Quiet => {}
            Mode::Json => self.as_json(&event),
            Mode::Plain => self.as_lines(&event),
            Mode::Terminal { .. } => self.as_bars(&event),
        }
    }
}

impl PullProgress {
    fn as_json(&self, event: &Event) {
        let value = match event {
            Event::Resolved { digest, layers } => {
                json!({"event": "resolved", "digest": digest.to_string(), "layers": layers})
            }
            Event::Cached { layer } => json!({"event": "layer-cached", "layer": layer.to_string()}),
            Event::Started { layer, total } => {
                json!({"event": "layer-started", "layer": layer.to_string(), "bytes": total})
            }
            // A program has no use for tens of thousands of these.
            Event::Advanced { .. } => return,
            Event::Unpacked { layer, unpacked } => {
                json!({"event": "layer-unpacked", "layer": layer.to_string(), "bytes": unpacked})
            }
            Event::Retrying {
                registry,
                wait,
                reason,
            } => {
                json!({"event": "retrying", "registry": registry, "wait_ms": wait.as_millis() as u64, "reason": reason})
            }
            Event::Waiting {
                registry,
                attempt,
                waited,
            } => {
                json!({"event": "waiting", "registry": registry, "attempt": attempt, "waited_ms": waited.as_millis() as u64})
            }
            Event::Assembling => json!({"event": "assembling"}),
            Event::Repairing { layer } => json!({"event": "repairing", "layer": layer.to_string()}),
            Event::Lazy { layer, form, fetched } => {
                json!({"event": "layer-lazy", "layer": layer.to_string(), "form": form, "bytes": fetched})
            }
            Event::Pushing { blob, sent, total } if sent == total => {
                json!({"event": "pushed", "blob": blob.to_string(), "bytes": total})
            }
            Event::Prefetched { done, total } if done == total => {
                json!({"event": "prefetched", "bytes": total})
            }
            Event::Pushing { .. } | Event::Prefetched { .. } | Event::Converting { .. } => return,
        };
        write_line(&value.to_string());
    }

    fn as_lines(&self, event: &Event) {
        match event {
            Event::Started {
                layer,
                total: Some(total),
            } => {
                write_line(&format!("pull: layer {}: {}", short(layer), HumanBytes(*total)));
            }
            Event::Started { layer, total: None } => write_line(&format!("pull: layer {}", short(layer))),
            Event::Unpacked { layer, unpacked } => {
                let seconds = self.began.elapsed().as_secs_f64();
                write_line(&format!(
                    "pull: layer {}: unpacked {} at {seconds:.1} s",
                    short(layer),
                    HumanBytes(*unpacked)
                ));
            }
            Event::Retrying {
                registry,
                wait,
                reason,
            } => {
                write_line(&format!(
                    "pull: {registry}: trying again in {:.1} s: {reason}",
                    wait.as_secs_f64()
                ));
            }
            Event::Waiting {
                registry,
                attempt,
                waited,
            } => write_line(&format!("pull: {}", waiting(registry, *attempt, *waited))),
            Event::Repairing { layer } => write_line(&format!("pull: layer {}: repairing", short(layer))),
            Event::Lazy { layer, form, fetched } => write_line(&format!(
                "pull: layer {}: read as needed ({form}), after {}",
                short(layer),
                HumanBytes(*fetched)
            )),
            Event::Pushing { blob, sent, total } if sent == total => {
                write_line(&format!("push: blob {}: {}", short(blob), HumanBytes(*total)));
            }
            Event::Resolved { .. }
            | Event::Cached { .. }
            | Event::Advanced { .. }
            | Event::Assembling
            | Event::Pushing { .. }
            | Event::Prefetched { .. }
            | Event::Converting { .. } => {}
        }
    }

    fn as_bars(&self, event: &Event) {
        let mut layers = self.layers.locked();
        match event {
            Event::Started { layer, total } => {
                if let Some(earlier) = layers.insert(*layer, self.begin(short(layer), *total)) {
                    self.bars.remove(&earlier.bar);
                }
            }
            Event::Advanced { layer, received, .. } => {
                if let Some(layer) = layers.get_mut(layer) {
                    layer.received = *received;
                    layer.bar.set_position(*received);
                }
            }
            Event::Unpacked { layer, unpacked } => {
                if let Some(layer) = layers.get(layer) {
                    layer
                        .bar
                        .finish_with_message(format!("unpacked {}", HumanBytes(*unpacked)));
                }
            }
            Event::Retrying {
                registry,
                wait,
                reason,
            } => {
                let text = format!(
                    "{registry}: trying again in {:.1} s: {reason}",
                    wait.as_secs_f64()
                );
                let _ = self.bars.println(text);
            }
            Event::Waiting {
                registry,
                attempt,
                waited,
            } => drop(self.bars.println(waiting(registry, *attempt, *waited))),
            Event::Repairing { layer } => {
                drop(self.bars.println(format!("repairing layer {}", short(layer))))
            }
            Event::Lazy { layer, form, fetched } => {
                let text = format!("{form}, read as needed");
                let layer_bar = layers
                    .entry(*layer)
                    .or_insert_with(|| self.begin(short(layer), Some(*fetched)));
                layer_bar.bar.set_position(*fetched);
                layer_bar.bar.finish_with_message(text);
            }
            Event::Pushing { blob, sent, total } => {
                let layer = layers
                    .entry(*blob)
                    .or_insert_with(|| self.begin(short(blob), Some(*total)));
                layer.bar.set_position(*sent);
                if sent == total {
                    layer.bar.finish_with_message("pushed");
                }
            }
            Event::Converting { done, total } => self.whole("converting", *done, *total),
            Event::Prefetched { done, total } => self.whole("prefetching", *done, *total),
            Event::Resolved { .. } | Event::Cached { .. } | Event::Assembling => {}
        }
    }

    /// A bar at the bottom.
    fn begin(&self, prefix: String, total: Option<u64>) -> Layer {
        let narrow = terminal::size().is_some_and(|(_, columns)| columns < BAR_COLUMNS);
        let look = match (total.is_some(), narrow) {
            (true, false) => "{prefix} {bar:30} {bytes:>11}/{total_bytes:<11} {wide_msg}",
            (false, false) => "{prefix} {spinner} {bytes:>11} {wide_msg}",
            (true, true) => "{prefix:8!} {percent:>3}% {wide_msg}",
            (false, true) => "{prefix:8!} {bytes} {wide_msg}",
        };
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        let bar = self.bars.add(bar.with_style(style(look)));
        bar.set_prefix(prefix);
        Layer { bar, received: 0 }
    }

    /// The bar of a step that concerns the whole image.
    fn whole(&self, what: &str, done: u64, total: u64) {
        let mut bar = self.whole.locked();
        let bar = bar.get_or_insert_with(|| self.begin(what.into(), Some(total)).bar);
        bar.set_length(total);
        bar.set_position(done);
        if done == total {
            bar.finish();
        }
    }
}

impl Drop for PullProgress {
    fn drop(&mut self) {
        let _ = self.bars.clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn waiting(registry: &str, attempt: u32, waited: Duration) -> String {
    format!(
        "waiting for {registry}: it has sent nothing for {} s (attempt {attempt})",
        waited.as_secs()
    )
}

/// The beginning of a digest, long enough to tell layers apart.
fn short(digest: &Digest) -> String {
    digest.hex().chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_images::form::Form;

    #[test]
    fn progress_never_fails_whatever_the_order_of_events() {
        let layer = Digest::of(b"x");
        for mode in [Mode::Quiet, Mode::Terminal { colour: true }] {
            let progress = Ui { mode }.pull();
            progress.event(Event::Advanced {
                layer,
                received: 5,
                unpacked: 1,
            });
            progress.event(Event::Unpacked { layer, unpacked: 1 });
            progress.event(Event::Started { layer, total: None });
            progress.event(Event::Started {
                layer,
                total: Some(3),
            });
            progress.event(Event::Advanced {
                layer,
                received: 5,
                unpacked: 1,
            });
            progress.event(Event::Unpacked { layer, unpacked: 1 });
            progress.event(Event::Lazy {
                layer,
                form: Form::Soci,
                fetched: 7,
            });
            for sent in [0, 9] {
                let total = 9;
                progress.event(Event::Pushing {
                    blob: layer,
                    sent,
                    total,
                });
                progress.event(Event::Converting { done: sent, total });
                progress.event(Event::Prefetched { done: sent, total });
            }
        }
    }
}
