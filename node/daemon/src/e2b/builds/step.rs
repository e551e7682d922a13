//! The steps of a build, as clients send them and as they are checked before the build begins.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::envd::call::user_name;
use super::super::failure::Failure;

/// Most steps of a build.
const MAX_STEPS: usize = 256;
/// What makes a part of a source a pattern, which the client has resolved.
const PATTERN: [char; 3] = ['*', '?', '['];

/// A step of a request.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NewStep {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    /// Run it although the same build exists.
    #[serde(default, skip_serializing)]
    pub force: bool,
    /// Of the client alone: whether and how it makes the archive.
    #[serde(default, rename = "forceUpload", skip_serializing)]
    _force_upload: Option<bool>,
    #[serde(default, rename = "resolveSymlinks", skip_serializing)]
    _resolve_symlinks: Option<bool>,
    #[serde(default, rename = "gzip", skip_serializing)]
    _gzip: Option<bool>,
}

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Run {
        command: String,
        user: Option<String>,
    },
    Copy(Copy),
    /// Names and values.
    Env(Vec<(String, String)>),
    Workdir(String),
    User(String),
}

/// What a step copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Where in the uploaded archive: a relative path without `..`. Empty: all of it.
    pub from: PathBuf,
    /// `from` is the directory of what a pattern matched: its contents are copied, also if it is only one file.
    pub is_pattern: bool,
    pub to: String,
    pub owner: Option<String>,
    /// Permission bits in octal.
    pub mode: Option<String>,
    /// The hash that names the upload.
    pub files: String,
}

impl Step {
    /// Checks the steps of a request.
    ///
    /// # Errors
    /// One cannot be; the error has its number.
    pub fn all(steps: &[NewStep]) -> Result<Vec<Step>, Failure> {
        if steps.len() > MAX_STEPS {
            let why = format!("there are {} steps; a build has at most {MAX_STEPS}", steps.len());
            return Err(Failure::Bad(why));
        }
        let read = steps.iter().enumerate().map(|(at, step)| {
            let wrong = |why: String| Failure::Bad(format!("step {} ({}): {why}", at + 1, step.kind));
            Step::of(step).map_err(wrong)
        });
        read.collect()
    }

    fn of(step: &NewStep) -> Result<Step, String> {
        let args = step.args.as_slice();
        if args.iter().any(|arg| arg.contains('\0')) {
            return Err("an argument has a NUL".into());
        }
        match (step.kind.to_ascii_uppercase().as_str(), args) {
            ("RUN", [command]) => Ok(Step::Run {
                command: command.clone(),
                user: None,
            }),
            ("RUN", [command, user]) => Ok(Step::Run {
                command: command.clone(),
                user: account(user)?,
            }),
            ("RUN", _) => Err("it has a command, and a user or none".into()),
            ("COPY", [from, to, rest @ ..]) if rest.len() <= 2 => copy(step, from, to, rest),
            ("COPY", _) => Err("it has a source, a destination, an owner or none, and a mode or none".into()),
            ("ENV", args) => env(args),
            ("WORKDIR", [path]) if !path.is_empty() => Ok(Step::Workdir(path.clone())),
            ("WORKDIR", _) => Err("it has one path".into()),
            ("USER", [user]) => match account(user)? {
                Some(user) => Ok(Step::User(user)),
                None => Err("the user's name is empty".into()),
            },
            ("USER", _) => Err("it has one user".into()),
            _ => Err("a step is RUN, COPY, ENV, WORKDIR or USER".into()),
        }
    }

    /// The upload that it needs.
    pub fn files(&self) -> Option<&str> {
        match self {
            Step::Copy(copy) => Some(&copy.files),
            _ => None,
        }
    }

    /// What a log says when it begins.
    pub fn title(&self) -> String {
        match self {
            Step::Run { command, .. } => format!("RUN {command}"),
            Step::Copy(copy) => format!("COPY {} {}", copy.from.display(), copy.to),
            // Values may be secrets.
            Step::Env(pairs) => {
                let names: Vec<&str> = pairs.iter().map(|(name, _)| name.as_str()).collect();
                format!("ENV {}", names.join(" "))
            }
            Step::Workdir(path) => format!("WORKDIR {path}"),
            Step::User(user) => format!("USER {user}"),
        }
    }
}

/// A user and a group or none; `None` if the text is empty.
fn account(text: &str) -> Result<Option<String>, String> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    for name in [user, group] {
        user_name(name).map_err(|_| format!("{text:?} is no user's name"))?;
    }
    Ok((!user.is_empty()).then(|| text.to_owned()))
}

fn env(args: &[String]) -> Result<Step, String> {
    let pairs = args.chunks(2).map(|pair| match pair {
        [name, value] if !name.is_empty() && !name.contains('=') => Ok((name.clone(), value.clone())),
        [name, _] => Err(format!("{name:?} is no variable's name")),
        _ => Err("it has names and values in turn".to_owned()),
    });
    let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
    match pairs.is_empty() {
        true => Err("it has no variable".into()),
        false => Ok(Step::Env(pairs)),
    }
}

fn copy(step: &NewStep, from: &str, to: &str, rest: &[String]) -> Result<Step, String> {
    let files = step.files_hash.as_deref().unwrap_or_default();
    if !is_hash(files) {
        return Err("filesHash is 64 hexadecimal digits in lower case".into());
    }
    if to.is_empty() {
        return Err("the destination is empty".into());
    }
    let mode = rest.get(1).filter(|mode| !mode.is_empty()).cloned();
    let is_mode = |mode: &String| mode.len() <= 5 && mode.bytes().all(|b| (b'0'..=b'7').contains(&b));
    if mode.as_ref().is_some_and(|mode| !is_mode(mode)) {
        return Err("a mode is octal, as 0755".into());
    }
    let (from, is_pattern) = source(from)?;
    Ok(Step::Copy(Copy {
        from,
        is_pattern,
        to: to.to_owned(),
        owner: rest.first().map_or(Ok(None), |owner| account(owner))?,
        mode,
        files: files.to_owned(),
    }))
}

/// Where in an archive a source is: its parts before the first pattern, without `.` and `..`. Also whether there is a pattern.
fn source(text: &str) -> Result<(PathBuf, bool), String> {
    let mut path = PathBuf::new();
    for part in Path::new(text).components() {
        match part {
            Component::Normal(part) if part.to_string_lossy().contains(PATTERN) => return Ok((path, true)),
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            Component::ParentDir if path.pop() => {}
            _ => {
                return Err(format!(
                    "the source {text:?} is not within the directory of the template"
                ));
            }
        }
    }
    Ok((path, false))
}

/// Whether a text is a SHA-256 as clients write it.
pub fn is_hash(text: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 64 && text.bytes().all(is_digit)
}

#[cfg(test)]
#[path = "step_test.rs"]
mod tests;
