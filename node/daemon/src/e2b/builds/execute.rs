//! Executes the steps of a build in its sandbox.
//!
//! As at E2B, `$NAME` in the values of ENV, WORKDIR and USER and in the destination of COPY is expanded by a shell in the sandbox. Nothing else of
//! a client becomes part of a script: scripts read it from their environment.

use std::path::PathBuf;

use super::super::context::{Context, MAX_BYTES};
use super::guest::{Guest, StepError, Surroundings};
use super::log::BuildLog;
use super::step::{Copy, Step};

/// Makes the account `$ACCOUNT`, unless it exists or is a number.
const MAKE_ACCOUNT: &str = r#"
id -u "$ACCOUNT" >/dev/null 2>&1 && exit 0
case $ACCOUNT in *[!0-9]*) ;; *) exit 0 ;; esac
shell=/bin/sh
[ -x /bin/bash ] && shell=/bin/bash
if command -v useradd >/dev/null 2>&1; then
  useradd -m -s "$shell" -- "$ACCOUNT"
else
  adduser -D -s "$shell" "$ACCOUNT"
fi
"#;

/// Makes the directory `$DIRECTORY` for `$OWNER`, unless it exists.
const MAKE_DIRECTORY: &str = r#"
[ -d "$DIRECTORY" ] && exit 0
mkdir -p -- "$DIRECTORY" && { [ -z "$OWNER" ] || chown -- "$OWNER" "$DIRECTORY"; }
"#;

/// Moves `$FROM`, below the directory of the unpacked archive, to `$TO`. A directory's contents join those of `$TO`.
const MOVE_FILES: &str = r#"
set -e
case $OWNER in
  '' | *:*) ;;
  *) group=$(id -g "$OWNER" 2>/dev/null) && OWNER=$OWNER:$group ;;
esac
if [ -L "$FROM" ] || [ -f "$FROM" ]; then
  [ -z "$OWNER" ] || chown -h -- "$OWNER" "$FROM"
  [ -z "$MODE" ] || [ -L "$FROM" ] || chmod -- "$MODE" "$FROM"
  case $TO in
    */) mkdir -p -- "$TO" ;;
    *) mkdir -p -- "$(dirname -- "$TO")" ;;
  esac
  mv -f -- "$FROM" "$TO"
elif [ -d "$FROM" ]; then
  [ -z "$OWNER" ] || chown -hR -- "$OWNER" "$FROM"
  [ -z "$MODE" ] || chmod -R -- "$MODE" "$FROM"
  if [ ! -d "$TO" ]; then
    mkdir -p -- "$TO"
    [ -z "$OWNER" ] || chown -- "$OWNER" "$TO"
  fi
  # One by one, so that a directory that is there keeps its owner and mode.
  for entry in "$FROM"/* "$FROM"/.[!.]* "$FROM"/..?*; do
    if [ -e "$entry" ] || [ -L "$entry" ]; then cp -a -- "$entry" "$TO/"; fi
  done
else
  echo "the uploaded archive does not have $FROM" >&2
  exit 1
fi
"#;

/// Executes steps, whose effects add up.
#[derive(Debug)]
pub struct Executor<'a> {
    pub guest: &'a Guest,
    pub log: &'a BuildLog,
    pub context: Context,
}

impl Executor<'_> {
    /// Executes one step. `archive` is the upload that it needs.
    ///
    /// # Errors
    /// It fails.
    pub async fn execute(&mut self, step: &Step, archive: Option<PathBuf>) -> Result<(), StepError> {
        match step {
            Step::Run { command, user } => {
                let with = Surroundings::of(&self.context, user.as_deref());
                let ended = self.guest.run(command, with, Some(self.log)).await?;
                self.succeeded(ended.code)
            }
            Step::Copy(copy) => {
                let archive = archive.ok_or_else(|| failed("its files are not uploaded, or are gone"))?;
                let archive = self.guest.unpack(&archive).await?;
                self.copy(copy, &archive).await
            }
            Step::Env(pairs) => {
                for (name, value) in pairs {
                    let value = self.expand(value).await?;
                    self.context.env.insert(name.clone(), value);
                }
                match self.context.size() > MAX_BYTES {
                    true => Err(failed(&format!(
                        "the variables have more than {MAX_BYTES} bytes together"
                    ))),
                    false => Ok(()),
                }
            }
            Step::Workdir(path) => {
                let path = self.absolute(path).await?;
                let owner = self.context.user.clone().unwrap_or_default();
                self.script(MAKE_DIRECTORY, &[("DIRECTORY", &path), ("OWNER", &owner)], "/")
                    .await?;
                self.context.workdir = Some(path);
                Ok(())
            }
            Step::User(user) => {
                let user = self.expand(user).await?;
                let account = user.split(':').next().unwrap_or_default();
                self.script(MAKE_ACCOUNT, &[("ACCOUNT", account)], "/").await?;
                self.context.user = Some(user);
                Ok(())
            }
        }
    }

    async fn copy(&self, copy: &Copy, archive: &str) -> Result<(), StepError> {
        let to = self.absolute(&copy.to).await?;
        // A pattern's directory itself is never a file.
        let slash = if copy.is_pattern { "/" } else { "" };
        let from = format!("./{}{slash}", copy.from.display());
        let owner = copy.owner.as_ref().or(self.context.user.as_ref());
        let variables = [
            ("FROM", from.as_str()),
            ("TO", to.as_str()),
            ("OWNER", owner.map_or("", String::as_str)),
            ("MODE", copy.mode.as_deref().unwrap_or_default()),
        ];
        self.script(MOVE_FILES, &variables, archive).await?;
        Ok(self.guest.remove(archive).await?)
    }

    /// Runs a script of the build as root, in a directory.
    async fn script(&self, script: &str, variables: &[(&str, &str)], at: &str) -> Result<(), StepError> {
        let with = Surroundings::of_script(&self.context, variables, at);
        let ended = self.guest.run(script, with, Some(self.log)).await?;
        self.succeeded(ended.code)
    }

    /// Checks the exit code of a command.
    fn succeeded(&self, code: i32) -> Result<(), StepError> {
        match (code, self.log.last_line()) {
            (0, _) => Ok(()),
            (code, Some(line)) => Err(failed(&format!("exit code {code}: {line}"))),
            (code, None) => Err(failed(&format!("exit code {code}"))),
        }
    }

    /// A text in which the guest's shell has replaced `$NAME`.
    async fn expand(&self, text: &str) -> Result<String, StepError> {
        if !text.contains('$') {
            return Ok(text.to_owned());
        }
        let script = format!("printf '%s' \"{}\"", quoted(text));
        let with = Surroundings::of(&self.context, None);
        let ended = self.guest.run(&script, with, None).await?;
        match (ended.code, String::from_utf8(ended.answer)) {
            (0, Ok(text)) if !text.contains('\0') => Ok(text),
            _ => Err(failed(&format!("{text:?} cannot be expanded"))),
        }
    }

    /// A path in which `$NAME` is replaced, from the working directory on.
    async fn absolute(&self, path: &str) -> Result<String, StepError> {
        let path = self.expand(path).await?;
        if path.starts_with('/') {
            return Ok(path);
        }
        let from = match &self.context.workdir {
            Some(workdir) => workdir.clone(),
            None => {
                let ended = self
                    .guest
                    .run("pwd", Surroundings::of(&self.context, None), None)
                    .await?;
                String::from_utf8_lossy(&ended.answer)
                    .trim_end_matches('\n')
                    .to_owned()
            }
        };
        Ok(format!("{}/{path}", from.trim_end_matches('/')))
    }
}

/// A text for double quotes of a shell, in which only `$` has a meaning, and `\$` is a dollar.
fn quoted(text: &str) -> String {
    let mut quoted = String::new();
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let is_plain = match c {
            '"' | '`' => false,
            '\\' => rest.peek() == Some(&'$'),
            _ => true,
        };
        if !is_plain {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted
}

/// The error of a step.
fn failed(why: &str) -> StepError {
    StepError::Failed(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn quoted_text_stays_within_its_quotes() {
        for (text, expected) in [
            ("$A b", "$A b"),
            (r#"say "$A" `id`"#, r#"say \"$A\" \`id\`"#),
            (r#"\"; id; "$A"#, r#"\\\"; id; \"$A"#),
            (r"C:\$A\", r"C:\$A\\"),
        ] {
            assert_eq!(quoted(text), expected, "{text}");
        }
    }
}
