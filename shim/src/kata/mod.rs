//! Kata's settings for pods that were written for Kata: annotations, and the operator's `configuration.toml`.
//!
//! Invariant: an annotation takes effect only if this module supports it and, where Kata requires it, the
//! operator's file enables it. An annotation that is not enabled or could reach the host fails the pod by
//! name. One that is unknown or has no meaning in Thaw is logged. Settings of the operator's file for parts
//! of Kata that Thaw does not have are logged and ignored.

pub mod settings;
pub mod table;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use regex_lite::Regex;
use thiserror::Error;
use toml::{Table, Value};

pub use self::settings::Settings;
use self::table::{Treatment, treatment};
use crate::error::Error;
use crate::options::Options;
use crate::{info, warning};

const ANNOTATIONS: &str = "io.katacontainers.config.";
/// Annotation that names another configuration file, chosen by the pod.
const CONFIG_PATH: &str = "io.katacontainers.config_path";
/// Where Kata looks for its configuration, in this order.
const FILES: [&str; 3] = [
    "/etc/kata-containers/configuration.toml",
    "/opt/kata/share/defaults/kata-containers/configuration.toml",
    "/usr/share/defaults/kata-containers/configuration.toml",
];
/// Directory beside the file whose files override its settings, in order of their names.
const DROP_INS: &str = "config.d";
/// The sections that are read.
const KINDS: [&str; 3] = ["hypervisor", "agent", "runtime"];
/// Largest configuration file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// The annotations that are enabled if there is no file: those that affect only the pod's own size.
const ENABLED: [&str; 3] = ["^default_vcpus$", "^default_max_vcpus$", "^default_memory$"];

/// Why a pod or the file is refused.
#[derive(Debug, Error)]
pub enum KataError {
    #[error("annotation {name} is not enabled: enable_annotations in {by} does not have it")]
    NotEnabled { name: String, by: String },
    #[error("annotation {name} is refused: {why}")]
    Refused { name: String, why: &'static str },
    #[error("annotation {name}: {value:?} {why}")]
    Value {
        name: String,
        value: String,
        why: String,
    },
    #[error("{file}: {why}")]
    File { file: String, why: String },
}

impl From<KataError> for Error {
    fn from(error: KataError) -> Error {
        match error {
            KataError::Refused { .. } => Error::Unsupported(error.to_string()),
            KataError::NotEnabled { .. } | KataError::Value { .. } | KataError::File { .. } => {
                Error::Invalid(error.to_string())
            }
        }
    }
}

/// The settings of a pod with these annotations. Ignored settings are logged.
pub fn settings(annotations: &BTreeMap<String, String>, options: &Options) -> Result<Settings, KataError> {
    let kata = Kata::of(options)?;
    if !kata.ignored.is_empty() {
        info!("{}: ignored (docs/kata.md): {}", kata.by, kata.ignored.join(", "));
    }
    let (settings, ignored) = kata.settings(annotations)?;
    for line in ignored {
        warning!("{line}");
    }
    Ok(settings)
}

/// The operator's configuration.
#[derive(Debug)]
struct Kata {
    /// The file's path, or the text that stands for it.
    by: String,
    defaults: Settings,
    enabled: Vec<Regex>,
    /// Settings of the file that have no meaning in Thaw.
    ignored: Vec<String>,
}

impl Kata {
    /// Reads the file that the runtime's options name, or else the first of Kata's files that exists. A missing file is not an error.
    pub fn of(options: &Options) -> Result<Kata, KataError> {
        match options {
            Options::File(path) => return Kata::read(path),
            Options::Text(text) => {
                let by = "the options of this runtime in containerd's file";
                let table = parsed(by, text)?;
                if KINDS.iter().any(|kind| table.contains_key(*kind)) {
                    return Kata::of_table(by.into(), &table);
                }
            }
            Options::None => {}
        }
        match FILES.iter().map(Path::new).find(|path| path.exists()) {
            Some(path) => Kata::read(path),
            None => Kata::without_file(),
        }
    }

    fn without_file() -> Result<Kata, KataError> {
        let enabled = ENABLED.iter().map(|pattern| Value::from(*pattern)).collect();
        let by = "no file of Kata's";
        Ok(Kata {
            by: by.into(),
            defaults: Settings::default(),
            enabled: patterns(by, &Value::Array(enabled))?,
            ignored: Vec::new(),
        })
    }

    /// Reads a `configuration.toml` and its drop-in files.
    fn read(path: &Path) -> Result<Kata, KataError> {
        let by = path.display().to_string();
        let mut kata = Kata::of_table(by.clone(), &parsed(&by, &text(path)?)?)?;
        for more in drop_ins(path)? {
            kata.add(&parsed(&more.display().to_string(), &text(&more)?)?)?;
        }
        Ok(kata)
    }

    fn of_table(by: String, table: &Table) -> Result<Kata, KataError> {
        let mut kata = Kata {
            by,
            defaults: Settings::default(),
            enabled: Vec::new(),
            ignored: Vec::new(),
        };
        kata.add(table)?;
        Ok(kata)
    }

    /// Adds the settings of a later file, which override earlier ones. Its list of annotations replaces the
    /// earlier list.
    fn add(&mut self, table: &Table) -> Result<(), KataError> {
        let mut enabled = Vec::new();
        let mut has_list = false;
        for (section, kind) in sections(table) {
            for (key, value) in section {
                match (kind, key.as_str()) {
                    ("hypervisor", "enable_annotations") => {
                        has_list = true;
                        enabled.extend(patterns(&self.by, value)?);
                    }
                    _ => self.take(&format!("{kind}.{key}"), value)?,
                }
            }
        }
        if has_list {
            self.enabled = enabled;
        }
        Ok(())
    }

    fn take(&mut self, name: &str, value: &Value) -> Result<(), KataError> {
        match treatment(name) {
            Some(Treatment::Honoured(set)) => {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                set(&mut self.defaults, &text).map_err(|why| KataError::File {
                    file: self.by.clone(),
                    why: format!("{name} = {value} {why}"),
                })
            }
            Some(Treatment::Ignored(_) | Treatment::Refused(_)) | None => {
                self.ignored.push(name.to_owned());
                Ok(())
            }
        }
    }

    /// The settings of a pod with these annotations, and a line for each ignored annotation.
    fn settings(&self, annotations: &BTreeMap<String, String>) -> Result<(Settings, Vec<String>), KataError> {
        let (mut settings, mut ignored) = (self.defaults.clone(), Vec::new());
        if annotations.contains_key(CONFIG_PATH) {
            return Err(KataError::Refused {
                name: CONFIG_PATH.into(),
                why: "it has the runtime read a file of the pod's choice on the host",
            });
        }
        for (annotation, value) in annotations {
            let Some(name) = annotation.strip_prefix(ANNOTATIONS) else {
                continue;
            };
            let treatment = treatment(name);
            if let (Some(key), Some(_)) = (name.strip_prefix("hypervisor."), treatment)
                && !self.enabled.iter().any(|pattern| pattern.is_match(key))
            {
                return Err(KataError::NotEnabled {
                    name: annotation.clone(),
                    by: self.by.clone(),
                });
            }
            match treatment {
                Some(Treatment::Honoured(set)) => {
                    set(&mut settings, value).map_err(|why| KataError::Value {
                        name: annotation.clone(),
                        value: value.clone(),
                        why,
                    })?;
                }
                Some(Treatment::Refused(why)) => {
                    return Err(KataError::Refused {
                        name: annotation.clone(),
                        why,
                    });
                }
                Some(Treatment::Ignored(why)) => ignored.push(format!("annotation {annotation}: {why}")),
                None => ignored.push(format!("annotation {annotation}: not known")),
            }
        }
        Ok((settings, ignored))
    }
}

fn text(path: &Path) -> Result<String, KataError> {
    let read = || -> io::Result<String> {
        let mut text = String::new();
        std::fs::File::open(path)?
            .take(MAX_FILE + 1)
            .read_to_string(&mut text)?;
        match text.len() as u64 > MAX_FILE {
            true => Err(io::Error::other("it is larger than 1 MiB")),
            false => Ok(text),
        }
    };
    read().map_err(|e| KataError::File {
        file: path.display().to_string(),
        why: format!("it cannot be read: {e}"),
    })
}

fn parsed(file: &str, text: &str) -> Result<Table, KataError> {
    text.parse().map_err(|e: toml::de::Error| KataError::File {
        file: file.to_owned(),
        why: e.to_string(),
    })
}

/// The drop-in files of `path`; `None` if there is no such directory.
fn drop_ins(path: &Path) -> Result<Vec<PathBuf>, KataError> {
    let directory = path.with_file_name(DROP_INS);
    let list = || -> io::Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|of| of == "toml") {
                all.push(path);
            }
        }
        all.sort();
        Ok(all)
    };
    match list() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(|e| KataError::File {
            file: directory.display().to_string(),
            why: format!("it cannot be listed: {e}"),
        }),
    }
}

/// The file's tables with their kind: `[hypervisor.qemu]` and `[agent.kata]` have one whatever their name.
fn sections(table: &Table) -> impl Iterator<Item = (&Table, &'static str)> {
    let named = |kind: &'static str| {
        let all = table.get(kind).and_then(Value::as_table);
        all.into_iter()
            .flatten()
            .filter_map(move |(_, section)| Some((section.as_table()?, kind)))
    };
    let runtime = table.get("runtime").and_then(Value::as_table);
    named("hypervisor")
        .chain(named("agent"))
        .chain(runtime.map(|section| (section, "runtime")))
}

/// Kata matches a pattern anywhere in a name unless it is anchored.
fn patterns(file: &str, value: &Value) -> Result<Vec<Regex>, KataError> {
    let wrong = |why: String| KataError::File {
        file: file.to_owned(),
        why: format!("enable_annotations: {why}"),
    };
    let all = value.as_array().ok_or_else(|| wrong("it is no list".into()))?;
    all.iter()
        .map(|pattern| {
            let pattern = pattern
                .as_str()
                .ok_or_else(|| wrong(format!("{pattern} is no text")))?;
            Regex::new(pattern).map_err(|e| wrong(format!("{pattern}: {e}")))
        })
        .collect()
}

#[cfg(test)]
#[path = "kata_test.rs"]
mod tests;
